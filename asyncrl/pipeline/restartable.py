"""The parts of a run that call the trainer, each behind ``TrainerRestarts``: a lost call is repeated after the restart.

A weight update begins again with a new snapshot and, once it publishes, a new version.  A checkpoint begins again if
no step was trained since, and counts as failed otherwise.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.errors import CheckpointFailed, LeaseLost, NonFiniteLoss, UpdateInterrupted
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.trainer_restarts import TrainerRestarted, TrainerRestarts
from asyncrl.protocols import Checkpointer, Trainer, WeightUpdater
from asyncrl.types import Batch, TrainReport, UpdateReport, Weights


def restartable(parts: Parts, plan: RunPlan) -> tuple[TrainerRestarts | None, Parts]:
    """Return the restarts of the trainer, and the parts that call it through them; None if it is not restarted."""
    if parts.trainer_processes is None or plan.max_trainer_restarts == 0:
        return None, parts
    restarts = TrainerRestarts(
        parts.trainer_processes,
        parts.trainer,
        parts.scheduler,
        parts.hooks,
        parts.timeline,
        most=plan.max_trainer_restarts,
        steps_done=plan.first_step,
    )
    checkpointer = parts.checkpointer
    return restarts, replace(
        parts,
        trainer=RestartableTrainer(restarts, parts.trainer),
        updater=RestartableUpdater(restarts, parts.updater),
        checkpointer=None if checkpointer is None else RestartableCheckpointer(restarts, checkpointer),
    )


class RestartableTrainer:
    """A ``Trainer`` whose steps are repeated after a restart."""

    def __init__(self, restarts: TrainerRestarts, trainer: Trainer) -> None:
        self._restarts = restarts
        self._trainer = trainer

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        try:
            report = await self._restarts.kept(lambda: self._trainer.train(batch))
        except NonFiniteLoss:
            self._restarts.note_step(batch.step, is_skipped=True)
            raise
        self._restarts.note_step(batch.step, is_skipped=False)
        return report

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""
        await self._restarts.kept(lambda: self._trainer.save(path))


class RestartableUpdater:
    """A ``WeightUpdater`` that reports a restart of the trainer as an interrupted update, which is then repeated."""

    def __init__(self, restarts: TrainerRestarts, updater: WeightUpdater) -> None:
        self._restarts = restarts
        self._updater = updater

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        return await self._interruptible(self._updater.snapshot)

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``."""
        return await self._interruptible(self._updater.resnapshot)

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        return await self._interruptible(lambda: self._updater.publish(weights))

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._updater.wait_for_rejoined()

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``."""
        self._updater.trainer_restarted(address)

    async def _interruptible[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._restarts.asked(ask)
        except TrainerRestarted as error:
            raise UpdateInterrupted("the trainer was restarted") from error


class RestartableCheckpointer:
    """A ``Checkpointer`` whose unfinished checkpoint is lost with the trainer."""

    def __init__(self, restarts: TrainerRestarts, checkpointer: Checkpointer) -> None:
        self._restarts = restarts
        self._checkpointer = checkpointer
        self._writing: tuple[int, Mapping[str, Any]] | None = None
        """Step and state of the checkpoint that is being written, as far as is known."""
        self._num_restarts = 0
        """The restarts before it began."""

    async def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """See ``Checkpointer.begin``."""
        self._writing = None
        await self._restarts.kept(lambda: self._checkpointer.begin(step, run))
        self._writing, self._num_restarts = (step, run), self._restarts.num_restarts

    async def check(self) -> None:
        """See ``Checkpointer.check``.  Begins a lost checkpoint again if the trainer still has its weights."""
        with suppress(TrainerRestarted):
            await self._asked(self._checkpointer.check)
        if self._is_lost():
            await self._begin_again()

    async def finish(self) -> None:
        """See ``Checkpointer.finish``.  Writes a lost checkpoint again if the trainer still has its weights."""
        while True:
            if self._is_lost():
                await self._begin_again()
            try:
                await self._asked(self._checkpointer.finish)
            except TrainerRestarted:
                continue
            if not self._is_lost():  # new ranks have nothing to finish
                self._writing = None
                return

    async def _begin_again(self) -> None:
        assert self._writing is not None, "a checkpoint is lost"
        step, run = self._writing
        if self._restarts.steps_done != step:
            self._writing = None
            raise CheckpointFailed(f"iter_{step:07}: the trainer was lost while it was written")
        await self.begin(step, run)

    async def _asked(self, ask: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._restarts.asked(ask)
        except (CheckpointFailed, LeaseLost):
            self._writing = None
            raise

    def _is_lost(self) -> bool:
        """Whether the trainer was restarted before it completed the checkpoint."""
        if self._writing is None or self._num_restarts == self._restarts.num_restarts:
            return False
        return self._restarts.restored_step < self._writing[0]
