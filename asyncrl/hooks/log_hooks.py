"""The user's log functions.  They see each step off the event loop, and neither slow nor end a run.

consumes      the facts and the row of each step
produces      the same rows, in order, with the numbers that the functions add
waits for     the functions, within ``timeout_s`` each
unblocked by  a function that returns
on cancel     the rows that wait are written without further numbers
"""

import asyncio
import logging
import numbers
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from asyncrl.errors import HookFailed, name_of
from asyncrl.event_loop import Deadline
from asyncrl.hooks.worker import Caller, HookLate
from asyncrl.protocols import EvalLogFn, RolloutLogFn
from asyncrl.types import Batch, EvalReport

logger = logging.getLogger(__name__)

MOST_WAITING = 4
"""Steps that wait for a log function; a function that is slower than training misses the steps after these."""

type Row = Mapping[str, float | int]
type Look = Callable[[], Mapping[str, float | int] | None]


class RowChanges(dict[str, float]):
    """Numbers of a log function that replace those of the row where it has the same names."""


@dataclass(slots=True, kw_only=True)
class _Function:
    """A log function with its thread, so that one that hangs does not hold the other up."""

    name: str
    worker: Caller
    is_stuck: bool = False
    """Whether a call was too late; its thread is busy, so there are no further calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    row: Row
    looks: tuple[tuple[_Function, Look], ...]
    """The call of each function that sees this step."""
    write: Callable[[Row], None]


class LogHooks:
    """Calls the log functions step by step and writes each row once they have returned."""

    def __init__(
        self,
        rollout: RolloutLogFn | None,
        evaluation: EvalLogFn | None,
        make_worker: Callable[[], Caller],
        timeout_s: float,
    ) -> None:
        """``make_worker`` makes the thread of one function."""
        self._rollout = rollout
        self._evaluation = evaluation
        self._rollout_function = _Function(name=name_of(rollout), worker=make_worker())
        self._eval_function = _Function(name=name_of(evaluation), worker=make_worker())
        self._timeout_s = timeout_s
        self._waiting = deque[_Step]()
        self._moved = asyncio.Event()
        self._idle = asyncio.Event()
        self._errors = Counter[str]()
        self._skipped = 0

    @property
    def wants_answers(self) -> bool:
        """Whether evaluations must keep their answers."""
        return self._evaluation is not None

    def step(self, batch: Batch, evaluation: EvalReport | None, row: Row, write: Callable[[Row], None]) -> None:
        """Show a step to the functions and ``write`` its row afterwards.  Returns at once."""
        looks: list[tuple[_Function, Look]] = []
        if self._rollout is not None:
            looks.append((self._rollout_function, partial(self._rollout, batch.step, batch, row)))
        if self._evaluation is not None and evaluation is not None:
            look = partial(self._evaluation, evaluation.weights.step, evaluation, row)
            looks.append((self._eval_function, look))
        if len(self._waiting) >= MOST_WAITING:
            self._skipped, looks = self._skipped + len(looks), []
        self._waiting.append(_Step(row=row, looks=tuple(looks), write=write))
        self._moved.set()

    async def run(self) -> None:
        """Call the functions and write the rows, until cancelled."""
        while True:
            await self._moved.wait()
            self._moved.clear()
            while self._waiting:
                self._write(await self._seen(self._waiting[0]))
            self._idle.set()

    async def finish(self) -> None:
        """Wait until every row so far is written; ``run`` must be running.

        Rows that are not written within the time limits of their functions are written without further numbers.
        """
        calls = sum(len(step.looks) for step in self._waiting)
        try:
            async with Deadline((calls + 1) * self._timeout_s):
                while self._waiting:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("log functions: no result at the end; %d rows lack their numbers", len(self._waiting))
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait, without calling a function."""
        while self._waiting:
            self._write({})

    def _write(self, further: Row) -> None:
        step = self._waiting.popleft()
        counts = {"log_function/errors": self._errors.total(), "log_function/skipped": self._skipped}
        step.write({**step.row, **further, **counts})

    async def _seen(self, step: _Step) -> dict[str, float | int]:
        """Return the numbers that the functions add to a step."""
        further: dict[str, float | int] = {}
        for function, look in step.looks:
            further |= await self._told(function, look, {**step.row, **further})
        return further

    async def _told(self, function: _Function, look: Look, row: Row) -> Row:
        if function.is_stuck:
            self._skipped += 1
            return {}
        try:
            return _checked(await function.worker.call(look, function.name, self._timeout_s), function.name, row)
        except HookFailed as error:
            self._note(function, error)
            return {}

    def _note(self, function: _Function, error: HookFailed) -> None:
        """Count an error; log the first one of each kind.  A function that hangs is not called again."""
        function.is_stuck = isinstance(error, HookLate)
        kind = f"{function.name}: {type(error.__cause__ or error).__name__}"
        self._errors[kind] += 1
        if self._errors[kind] == 1:
            more = "it is not called any more" if function.is_stuck else "further errors of this kind are counted"
            logger.warning("log function %s; %s", error, more, exc_info=error.__cause__)


def _checked(returned: Any, name: str, row: Row) -> Row:
    """Return the function's numbers.

    Raises HookFailed for anything else, and for a name that the row already has, except in RowChanges.
    """
    if returned is None or isinstance(returned, bool):
        return {}
    if not isinstance(returned, Mapping):
        raise HookFailed(f"{name}: must return a dict of numbers or None, got a {type(returned).__name__}")
    for key, value in returned.items():
        if not isinstance(key, str) or not isinstance(value, numbers.Real):
            raise HookFailed(f"{name}: returned {key!r}: {value!r}, not a name and a number")
        if key in row and not isinstance(returned, RowChanges):
            raise HookFailed(f"{name}: returned {key}, which the row already has")
    return {key: _number(value, f"{name}: returned {key!r}") for key, value in returned.items()}


def _number(value: numbers.Real, what: str) -> float:
    try:
        return float(value)
    except Exception as error:  # of a class of the user's, or of an integer above all floats
        raise HookFailed(f"{what}: {type(error).__name__}: {error}") from error
