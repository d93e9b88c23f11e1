"""Path checks of the driver: which engines can the trainer reach with weights?

An engine may answer HTTP although its path for collectives is cut.  The trainer therefore meets one engine after the
other, each in a separate group (``path_check``), so that a failure names its engine.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from asyncrl.engines.weight_sync.path_check import PATH_CHECK, PATH_S, Meeting
from asyncrl.errors import EngineError, EngineTimeout, WeightUpdateFailed, plainly
from asyncrl.event_loop import Deadline
from asyncrl.task_groups import TaskGroup

_GRACE_S = 5.0
"""Seconds by which an engine's deadline ends after the trainer's, whose failure says more."""


class TrainerEnd(Protocol):
    """The trainer's side of a path check."""

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        """Run a collective with one engine, as rank 0 of the group ``where``; possible while training.

        Raises WeightUpdateFailed after about ``timeout_s`` if there was none, or TrainerFailed.
        """


class EngineEnd(Protocol):
    """The engine's side of a path check."""

    num_ranks: int

    @property
    def url(self) -> str:
        """The engine's URL, which identifies it."""

    async def meet_trainer(self, where: Meeting) -> bool:
        """Run a collective with the trainer in the group ``where``.

        Returns False if this engine knows no path checks.  Raises EngineTimeout, EngineLost or EngineRejected.
        """


class Reach:
    """The reach of the trainer's weights, engine by engine."""

    def __init__(
        self,
        trainer: TrainerEnd,
        *,
        master_address: str,
        find_port: Callable[[], Awaitable[int]],
        backend: str,
        timeout_s: float,
    ) -> None:
        """``timeout_s`` is the trainer's deadline for a call; it must suffice for a check and for its abort."""
        self._trainer = trainer
        self.master_address = master_address
        self._find_port = find_port
        self._backend = backend
        self._path_s = min(PATH_S, timeout_s / 4)
        self._num_checks = 0

    async def unmet(self, engines: Iterable[EngineEnd]) -> dict[str, str]:
        """Have the trainer meet each engine; return the ones that it cannot meet, with the reasons.

        Engines that know no path checks count as met.  Raises TrainerFailed.
        """
        failures = {engine.url: await self._failure(engine) for engine in engines}
        cut_off = f"answers HTTP but runs no {self._backend} collective with the trainer at {self.master_address}"
        return {url: f"{cut_off}: {why}" for url, why in failures.items() if why is not None}

    async def _failure(self, engine: EngineEnd) -> str | None:
        self._num_checks += 1
        where = Meeting(
            master_address=self.master_address,
            master_port=await self._find_port(),
            world_size=1 + engine.num_ranks,
            group_name=f"{PATH_CHECK}{self._num_checks}",
            backend=self._backend,
        )
        meeting = self._trainer.meet_engine(where, timeout_s=self._path_s)
        # Neither side's failure cancels the other: the trainer must have ended a check before the next one begins.
        with plainly():
            async with TaskGroup() as tasks:
                trainer = tasks.create_task(_outcome(meeting), name=f"{where.group_name}: trainer")
                answer = tasks.create_task(
                    _outcome(self._answer(engine, where)), name=f"{where.group_name}: {engine.url}"
                )
        if answer.result() is False:
            return None
        failures = [each for each in (trainer.result(), answer.result()) if isinstance(each, Exception)]
        return str(failures[0]) if failures else None

    async def _answer(self, engine: EngineEnd, where: Meeting) -> bool:
        try:
            async with Deadline(self._path_s + _GRACE_S):
                return await engine.meet_trainer(where)
        except TimeoutError as error:
            raise EngineTimeout(f"{engine.url} did not answer the path check") from error


async def _outcome[T](work: Awaitable[T]) -> T | EngineError | WeightUpdateFailed:
    """Return the result of one side, or its failure."""
    try:
        return await work
    except (EngineError, WeightUpdateFailed) as error:
        return error
