"""Busy times of trainer, engines and updates: intervals on the event loop's clock, measured around the calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from asyncrl.event_loop import loop_time
from asyncrl.metrics.intervals import Interval, clipped
from asyncrl.protocols import RolloutEngine, Trainer, WeightUpdater
from asyncrl.types import Batch, Chunk, FinishReason, Request, TrainReport, UpdateReport, Weights


class Intervals:
    """Times of an activity, which may overlap itself."""

    def __init__(self) -> None:
        self._closed: list[Interval] = []
        self._open: dict[int, float] = {}
        self._numbers = count()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Record the time of the ``with`` block."""
        number = next(self._numbers)
        self._open[number] = loop_time()
        try:
            yield
        finally:
            self._closed.append((self._open.pop(number), loop_time()))

    def add(self, start_s: float, stop_s: float) -> None:
        """Record one interval."""
        self._closed.append((start_s, stop_s))

    def within(self, start_s: float, stop_s: float) -> list[Interval]:
        """The parts between ``start_s`` and ``stop_s``, of open intervals too."""
        going_on = [(began, stop_s) for began in self._open.values()]
        return clipped([*self._closed, *going_on], start_s, stop_s)


class WatchedEngine:
    """A ``RolloutEngine`` over another; ``busy`` has one interval for each request."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.busy = Intervals()
        self.aborted = 0
        """Requests whose caller cancelled them, so far."""
        self._engine = engine

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        try:
            with self.busy.one():
                return await self._engine.generate(request, on_chunk)
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``."""
        await self._engine.interrupt()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        return await self._engine.score(token_ids, start)


class WatchedTrainer:
    """A ``Trainer`` over another; ``busy`` has one interval for each step.  Saves nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self.busy = Intervals()
        self._trainer = trainer

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        with self.busy.one():
            return await self._trainer.train(batch)

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``; saves nothing, since the weights are random."""


class WatchedUpdater:
    """A ``WeightUpdater`` over another; ``pauses`` has one interval for each update.

    ``before`` is awaited before each snapshot; an arrangement may wait in it.  It is not part of the update.
    """

    def __init__(self, updater: WeightUpdater, before: Callable[[], Awaitable[object]] | None = None) -> None:
        self.pauses = Intervals()
        self.snapshots = Intervals()
        """Times in which the trainer waited for the snapshot of its weights."""
        self._updater = updater
        self._before = before

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        if self._before is not None:
            await self._before()
        start = loop_time()
        goes_on = await self._updater.snapshot()
        self.snapshots.add(start, loop_time())
        return goes_on

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``; the trainer does not wait."""
        return await self._updater.resnapshot()

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``."""
        self._updater.trainer_restarted(address)

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._updater.wait_for_rejoined()

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        report = await self._updater.publish(weights)
        stop = loop_time()
        self.pauses.add(stop - report.pause_s, stop)
        return report
