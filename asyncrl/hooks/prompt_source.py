"""The prompts of a user's data source, fetched ahead in a thread.

consumes      prompts of the user's source, in the source's thread
produces      tokenised prompts, at most ``ahead`` of them before they are taken
waits for     the source, within ``timeout_s`` for each call
unblocked by  a prompt that is taken, a group that ends
on cancel     a call in progress ends in its thread, without effect
on crash      prompts after the last checkpoint's state are fetched again, if the source resumes there, and left out
              if the journal has them
"""

import asyncio
import logging
import os
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asyncrl.errors import HookFailed
from asyncrl.hooks.worker import Caller
from asyncrl.protocols import UserSource
from asyncrl.types import NewPrompt, Prompt, ScoredGroup, SourceState

logger = logging.getLogger(__name__)

type Tokenise = Callable[[NewPrompt, int], Prompt | None]
"""Makes the prompt of a row; None if it is too long.  Raises DataError."""

FLAG = "--data-source-path"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A group that ended: finished if ``outcome`` is None, else returned."""

    prompt: Prompt
    group: ScoredGroup | None
    outcome: str | None


class UserPrompts:
    """A ``PromptSource`` of a user's data source, and the ``GroupObserver`` that reports to it.

    Rows are numbered in the order in which they are fetched, over the whole run; there is one epoch.
    """

    def __init__(
        self, source: UserSource, tokenise: Tokenise, *, name: str, ahead: int, worker: Caller, timeout_s: float
    ) -> None:
        self._source = source
        self._tokenise = tokenise
        self._name = f"{FLAG} {name}"
        self._limit = ahead
        self._worker = worker
        self._timeout_s = timeout_s
        self._ahead = deque[Prompt]()
        self._ended = deque[_Ended]()
        self._origins: dict[int, tuple[weakref.ref[Prompt], Any]] = {}
        """The source's object of each living prompt, by row.  An entry is removed when its prompt is freed."""
        self._given: list[Prompt] = []
        """Prompts that the source will give again, and that are then left out."""
        self._num_to_compare = 0
        self._num_fetched = 0
        self._num_too_long = 0
        self._is_filling = True
        """Whether prompts are fetched until ``ahead`` of them wait; then none until half of them are taken."""
        self._has_ended = False
        """Whether no prompt waits and the source gave none when it was asked since the last change."""
        self._failure: HookFailed | None = None
        """The error of a call, after which there are no further ones."""
        self._wanted = asyncio.Event()
        self._there = asyncio.Event()
        self._calls = asyncio.Lock()
        # Invariant: the source is called only while this lock is held, so a state is taken between two calls.

    def __len__(self) -> int:
        """Return 0: the number of prompts is unknown."""
        return 0

    @property
    def fingerprint(self) -> str:
        """The source's name, without the folder of its file, which may move.  Its prompts cannot be compared."""
        file, ending, rest = self._name.removeprefix(f"{FLAG} ").partition(".py:")
        return f"{FLAG} {file.rpartition(os.sep)[2]}.py:{rest}" if ending and "(" not in file else self._name

    # ---- prompts

    async def ready(self) -> None:
        """Wait until ``take`` returns at once; ``run`` must be running.

        Raises HookFailed if the source has ended or failed, and no prompt is left.
        """
        while not self._ahead:
            if self._failure is not None:
                raise self._failure
            if self._has_ended:
                raise HookFailed(
                    f"{self._name}: has no prompts left after {self._num_fetched}; a source must be endless"
                )
            self._there.clear()
            await self._there.wait()

    def take(self) -> Prompt:
        """Return the next prompt.  Allowed only after ``ready``."""
        prompt = self._ahead.popleft()
        self._ask()
        return prompt

    def at(self, epoch: int, row: int) -> Prompt:
        """Raise KeyError: checkpoints store these prompts whole."""
        raise KeyError(f"{self._name} has no rows to look up")

    def seek(self, position: int) -> None:
        """Number the next prompt with ``position``."""
        self._num_fetched = position

    async def run(self) -> None:
        """Fetch prompts and report groups to the source, until cancelled.

        Ends if a call fails or takes too long; ``ready`` raises its HookFailed once the prompts so far are taken.
        """
        self._ask()
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                async with self._calls:
                    await self._report()
                    await self._fill()
        except HookFailed as error:
            self._failure = error
            self._there.set()

    def _ask(self) -> None:
        """Let ``run`` report groups and fetch prompts, also from a source that had none."""
        self._has_ended = False
        self._wanted.set()

    async def _fill(self) -> None:
        """Fetch prompts once, and again in the next round unless enough of them wait or the source has none."""
        missing = self._limit - len(self._ahead)
        self._is_filling = missing > 0 and (self._is_filling or len(self._ahead) <= self._limit // 2)
        if self._is_filling and await self._fetch(1 if self._source.fetches_singly else missing):
            self._wanted.set()

    async def _fetch(self, count: int) -> bool:
        """Fetch up to ``count`` prompts; return whether the source gave any."""
        fetched, dropped = await self._call(partial(self._next, count, self._num_fetched))
        self._num_fetched += len(fetched) + dropped
        self._num_too_long += dropped
        if dropped and dropped == self._num_too_long:
            logger.warning("%s: left out a prompt above --rollout-max-prompt-len; later ones are not named", self._name)
        self._ahead.extend(each for each in fetched if not self._is_given_again(each))
        asks_again = self._wanted.is_set()  # a group ended during the call: the source may have prompts now
        self._has_ended = not (fetched or dropped or self._ahead or asks_again)
        if self._ahead or self._has_ended:
            self._there.set()
        return bool(fetched or dropped)

    def _is_given_again(self, prompt: Prompt) -> bool:
        """Return whether groups of the killed run took the prompt, which then does not count as given any more."""
        if not self._num_to_compare:
            return False
        self._num_to_compare -= 1
        known = ((each.text, each.token_ids) == (prompt.text, prompt.token_ids) for each in self._given)
        place = next((place for place, is_same in enumerate(known) if is_same), None)
        if place is not None:
            del self._given[place]
        if self._given and not self._num_to_compare:
            text = "%s: gives other prompts than before the kill: %d that it gave since the checkpoint did not return"
            logger.warning(text, self._name, len(self._given))
            self._given.clear()
        return place is not None

    def _next(self, count: int, first: int) -> tuple[list[Prompt], int]:
        """Return the tokenised prompts of the next ``count``, and the number of too long ones.  Runs in the thread."""
        given = self._source.fetch(count, first)
        made = [(self._tokenise(new, first + place), new.origin) for place, new in enumerate(given)]
        fetched = [(prompt, origin) for prompt, origin in made if prompt is not None]
        for prompt, origin in fetched:
            if origin is not None:
                self._keep(prompt, origin)
        return [prompt for prompt, _ in fetched], len(made) - len(fetched)

    def _keep(self, prompt: Prompt, origin: Any) -> None:
        row = prompt.row
        self._origins[row] = (weakref.ref(prompt, lambda _: self._origins.pop(row, None)), origin)

    async def _call[T](self, function: Callable[[], T]) -> T:
        return await self._worker.call(function, self._name, self._timeout_s)

    @property
    def get_samples(self) -> Callable[[int], Any] | None:
        """``get_samples`` of a source of slime's shape, for other threads; None for another source.

        A call raises HookFailed.
        """
        function: Callable[[int], Any] | None = getattr(self._source, "get_samples", None)
        if function is None:
            return None
        return lambda count: self._worker.call_now(partial(function, count), self._name, self._timeout_s)

    # ---- groups that end

    def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
        """Report a scored group to a source that wants to know."""
        if self._source.wants_finished:
            self._ended.append(_Ended(prompt=group.prompt, group=group, outcome=None))
            self._ask()

    def returned(self, prompt: Prompt, group: ScoredGroup | None, outcome: str, /) -> bool:
        """Give the prompt of a stale or failed group back to a source that takes it."""
        if not self._source.wants_returned:
            return False
        self._ended.append(_Ended(prompt=prompt, group=group, outcome=outcome))
        self._ask()
        return True

    async def _report(self) -> None:
        while self._ended:
            told, is_taken = self._ended[0], True
            if told.outcome is not None:
                _, origin = self._origins.get(told.prompt.row, (None, None))
                is_taken = await self._call(partial(self._source.give_back, told.prompt, told.group, origin))
            elif told.group is not None:
                await self._call(partial(self._source.finished, told.group))
            self._ended.popleft()
            if not is_taken and told.outcome == "stale":
                self._ahead.appendleft(told.prompt)
                self._there.set()

    # ---- resuming

    @asynccontextmanager
    async def saved(self, step: int) -> AsyncIterator[SourceState]:
        """Hold the source still, and yield its state after ``step`` steps and the prompts fetched ahead."""
        async with self._calls:
            await self._report()
            state = await self._call(partial(self._source.state, step))
            waiting = (*(told.prompt for told in self._ended if told.outcome == "stale"), *self._ahead)
            yield replace(self.at_start(), state=state, ahead=waiting)

    def at_start(self) -> SourceState:
        """Return the state before the first call of the source, whose own state is None: it is not asked."""
        return SourceState(fetched=self._num_fetched, state=None, ahead=tuple(self._ahead), given=tuple(self._given))

    @property
    def takes_back(self) -> bool:
        """Whether the source takes prompts of stale groups back, and gives them again as new rows."""
        return self._source.wants_returned

    def leave_out(self, given: Sequence[Prompt], next_row: int = 0) -> None:
        """Leave out prompts that the source gives again, because its state is from before they were taken.

        They are recognized by text and tokens, among as many prompts as there are of them.  New prompts have rows from
        ``next_row`` on.
        """
        self._given, self._num_to_compare = list(given), len(given)
        self._num_fetched = max(self._num_fetched, next_row)

    def restore(self, step: int, fetched: int, state: Any) -> None:
        """Continue from the state of a checkpoint after ``step`` steps.  Raises HookFailed."""
        self.seek(fetched)
        self._worker.call_now(partial(self._source.load, step, state), self._name, self._timeout_s)


def new_prompts(given: Sequence[object]) -> list[NewPrompt]:
    """Check the prompts that a source gave.  Raises HookFailed."""
    for new in given:
        if not isinstance(new, NewPrompt):
            raise HookFailed(f"must give asyncrl.types.NewPrompt, got a {type(new).__name__}")
    return list(given)  # type: ignore[arg-type]
