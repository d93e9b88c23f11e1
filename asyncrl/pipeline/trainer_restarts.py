"""The trainer dies, and the run lives: its ranks start again while the engines generate.

lost ──▶ new ranks, with the newest complete checkpoint ──▶ the batches since then, again ──▶ the call is repeated

consumes      failed calls of the trainer; the end of an idle rank; a shortage of memory that living ranks report
produces      a trainer after as many steps as before
waits for     the start of the ranks, the journal, and a training step per batch, each within its deadline
unblocked by  the ranks
on cancel     the restart ends half-way; the next call of the trainer begins another one
on crash      see ``pipeline/recovery``: the same checkpoint and the same batches

Nothing that a step did besides training is repeated: no account, row, file, evaluation or weight update.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from asyncrl.buffer.journal import RecordedSteps
from asyncrl.errors import (
    AsyncRLError,
    CheckpointFailed,
    ConfigError,
    LeaseLost,
    TrainerFailed,
    TrainerOutOfMemory,
    UpdateInterrupted,
    WeightUpdateFailed,
)
from asyncrl.event_loop import Deadline, loop_time
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.protocols import BatchPreparer, Trainer, TrainerProcesses

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Seconds by which the wait before each further attempt grows; the obstacle may be gone by then."""
READ_S = 600.0
"""Most seconds to read the journal, and to decode one batch of it: 100 GB at 200 MB/s."""


class TrainerRestarted(Exception):
    """A call of the trainer was lost, and the trainer is back."""


class TrainerRestarts:
    """The restarts of one run's trainer.  All calls of the trainer go through ``asked`` or ``kept``."""

    def __init__(
        self,
        processes: TrainerProcesses,
        trainer: Trainer,
        scheduler: Scheduler,
        hooks: BatchPreparer | None,
        timeline: Timeline,
        *,
        most: int,
        steps_done: int,
    ) -> None:
        """Allow ``most`` attempts between two completed steps; ``steps_done`` are the steps before this run."""
        self._processes = processes
        self._trainer = trainer
        self._scheduler = scheduler
        self._hooks = hooks
        self._timeline = timeline
        self._most = most
        self._attempts = 0
        """Attempts since the last completed step."""
        self._has_ranks = False
        """Whether the ranks of the present attempt have loaded their weights."""
        self._skipped = set[int]()
        """Steps that changed no weights."""
        self._present = asyncio.Event()
        self._present.set()
        self._one_at_a_time = asyncio.Lock()
        self.steps_done = steps_done
        """Training steps behind the trainer's weights, skipped ones included."""
        self.num_restarts = 0
        self.restored_step = steps_done
        """The step of the checkpoint with which the trainer started last."""
        self.away_s = 0.0
        """Seconds without a trainer."""

    def note_step(self, step: int, *, is_skipped: bool) -> None:
        """Note that the trainer has completed a step."""
        self.steps_done = step + 1
        self._attempts = 0
        if is_skipped:
            self._skipped.add(step)

    async def watch(self) -> NoReturn:
        """Restart the trainer also if it dies between two calls; run until cancelled.  Raises TrainerFailed."""
        while True:
            num_restarts = self.num_restarts
            await self._restart(num_restarts, await self._processes.wait_until_lost())

    async def kept[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the trainer's answer; ask again after each restart."""
        while True:
            try:
                return await self.asked(ask)
            except TrainerRestarted:
                continue

    async def asked[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the trainer's answer.  Raises TrainerRestarted after a restart, and what ``ask`` raises otherwise."""
        await self._present.wait()
        num_restarts = self.num_restarts
        try:
            return await ask()
        except UpdateInterrupted:  # an engine was lost; the next call finds out about the trainer
            raise
        except (TrainerFailed, WeightUpdateFailed, CheckpointFailed) as error:
            why = await self._why_lost(num_restarts, error)
            if why is None and not self._saves_memory(error):
                raise
            await self._restart(num_restarts, why or str(error))
            raise TrainerRestarted from error

    async def _why_lost(self, num_restarts: int, error: AsyncRLError) -> str | None:
        """Return why a call failed, if the trainer is or was lost; None if the trainer lives and reported the error."""
        if not self._is_as_at(num_restarts):
            return str(error)
        why = await self._processes.find_lost()
        return why if self._is_as_at(num_restarts) else str(error)

    def _saves_memory(self, error: AsyncRLError) -> bool:
        """Have the next ranks need less memory if ``error`` is a shortage; return whether they will."""
        if not isinstance(error, TrainerOutOfMemory) or self._attempts >= self._most:
            return False
        flags = self._processes.save_memory()
        if flags is not None:
            logger.warning("the trainer ran out of memory and starts again with %s; give later runs these flags", flags)
        return flags is not None

    def _is_as_at(self, num_restarts: int) -> bool:
        return self._present.is_set() and self.num_restarts == num_restarts

    async def _restart(self, num_restarts: int, why: str) -> None:
        """Restart the trainer, unless that was done since ``num_restarts``."""
        async with self._one_at_a_time:
            if self.num_restarts != num_restarts:
                return
            self._present.clear()
            start = loop_time()
            try:
                with self._scheduler.silence_allowed():
                    num_steps = await self._started_at_last(why)
            finally:
                self._present.set()
                self.away_s += loop_time() - start
            self.num_restarts += 1
        self._timeline.span("trainer", f"restart {self.num_restarts}", start, loop_time(), steps=num_steps)
        text = "trainer restarted: %d steps trained again in %.1f s; the engines generated meanwhile"
        logger.warning(text, num_steps, loop_time() - start)

    async def _started_at_last(self, why: str) -> int:
        """Start the trainer, in several attempts if one fails; return the number of steps trained again."""
        while True:
            if self._attempts >= self._most:
                text = f"{why}; restarts since the last completed step: {self._attempts} (max-trainer-restarts)"
                raise TrainerFailed(text)
            self._attempts += 1
            text = "the trainer is lost, and starts again from its checkpoint (attempt %d, max-trainer-restarts %d): %s"
            logger.warning(text, self._attempts, self._most, why)
            await asyncio.sleep(AGAIN_S * (self._attempts - 1))
            try:
                return await self._started()
            except (ConfigError, LeaseLost):
                raise
            except AsyncRLError as error:
                is_alive = self._has_ranks and await self._processes.find_lost() is None
                if is_alive and not self._saves_memory(error):
                    raise  # living ranks reported it, so another attempt would fail as well
                why = str(error)

    async def _started(self) -> int:
        """Start the ranks, and train the batches since their checkpoint; return how many these are."""
        self._has_ranks = False
        first = await self._processes.restart()
        self.restored_step, self._has_ranks = first, True
        steps = [step for step in range(first, self.steps_done) if step not in self._skipped]
        if not steps:
            return 0
        recorded = await self._recorded(first)
        if missing := recorded.missing(steps):
            raise TrainerFailed(f"the journal lacks the batch of step {missing[0]}, so the trainer cannot start again")
        for step in steps:
            await self._train_again(recorded, step)
        return len(steps)

    async def _recorded(self, first: int) -> RecordedSteps:
        try:
            async with Deadline(READ_S):
                recorded = await self._scheduler.steps_since(first)
        except OSError as error:  # TimeoutError is one
            why = str(error) or f"not within {READ_S:g} s"
            raise TrainerFailed(f"the journal cannot be read, so the trainer cannot start again: {why}") from error
        if recorded is None:
            raise TrainerFailed(f"the journal is off or begins after step {first}, so the trainer cannot start again")
        return recorded

    async def _train_again(self, recorded: RecordedSteps, step: int) -> None:
        try:
            async with Deadline(READ_S):
                batch = self._scheduler.masked(await recorded.batch(step))
        except TimeoutError as error:
            raise TrainerFailed(f"the batch of step {step} was not read within {READ_S:g} s") from error
        if self._hooks is not None:
            batch = await self._hooks.prepared_again(batch)
        await self._trainer.train(batch)
        logger.info("step %d: trained again after the restart of the trainer", step)
