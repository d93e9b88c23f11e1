"""Training on saved batches, without engines (``--load-debug-rollout-data``).

file of a step ──▶ trainer ──▶ the step's row

waits for     the trainer, which has a deadline for each step; a file, in a thread, for READING_S
on cancel     the ranks end with Ray
never         a weight update, an evaluation or a checkpoint; the final weights are saved
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from pathlib import Path

from asyncrl.daemon_threads import DaemonThreads
from asyncrl.errors import DataError
from asyncrl.event_loop import Deadline, loop_time
from asyncrl.metrics.facts import GroupCounts, SchedulerStats, StepFacts, TokenCounts
from asyncrl.metrics.length_bias import LengthStats
from asyncrl.metrics.mismatch import mismatch_of
from asyncrl.protocols import Trainer
from asyncrl.rollout_log.batch_file import read_batch
from asyncrl.types import Batch, Weights

READING_S = 600.0
"""Seconds to read one file."""


async def train_on_files(
    deployed: AbstractAsyncContextManager[Trainer],
    steps: Iterable[int],
    file_of: Callable[[int], Path],
    before: tuple[TokenCounts, GroupCounts],
    *,
    num_updates: int,
    save_to: Path,
    phase: Callable[[str], None],
    report: Callable[[StepFacts], None],
    ending: AbstractContextManager[object],
) -> None:
    """Start the trainer, train on the file of each step, and save the final weights.

    ``deployed`` starts and ends the trainer.  ``before`` are the accounts before the first step.  A step has
    ``num_updates`` optimizer updates.  ``phase`` receives the name of each phase, and ``report`` each step's facts.
    The exit of ``ending`` tells that only the clean-up is left.  Raises DataError for a file that cannot be read or has
    too few groups, and the errors of the trainer.
    """
    files = DaemonThreads(1, "batches")
    async with deployed as trainer:
        phase("training on saved batches")
        with ending:
            for step in steps:
                start = loop_time()
                batch = await _read(files, file_of(step))
                _check_groups(batch, file_of(step), num_updates)
                facts = await _trained(trainer, Batch(step=step, groups=batch.groups), before, start)
                before = facts.scheduler.tokens, facts.scheduler.groups
                report(facts)
            await trainer.save(save_to)


async def _read(files: DaemonThreads, path: Path) -> Batch:
    """Read a batch in a thread.  Raises DataError."""
    try:
        async with Deadline(READING_S):
            return await asyncio.wrap_future(files.submit(read_batch, path))
    except TimeoutError as error:
        raise DataError(f"{path} was not read within {READING_S:g} s") from error


def _check_groups(batch: Batch, path: Path, num_updates: int) -> None:
    """Raise DataError if there are fewer groups than optimizer updates, which split no group."""
    if len(batch.groups) < num_updates:
        raise DataError(
            f"{path} has {len(batch.groups)} groups, a step with {num_updates} optimizer updates "
            "(num-steps-per-rollout, or global-batch-size) needs as many; give fewer updates"
        )


async def _trained(
    trainer: Trainer, batch: Batch, before: tuple[TokenCounts, GroupCounts], start_s: float
) -> StepFacts:
    read_s = loop_time()
    report = await trainer.train(batch)
    trained_s = loop_time()
    return StepFacts(
        batch=batch,
        report=report,
        update=None,
        evaluation=None,
        scheduler=_stats(batch, before),
        trainer_waited_s=read_s - start_s,
        engines_idle_s=0.0,
        train_s=trained_s - read_s,
        late_update_s=0.0,
        step_s=trained_s - start_s,
        loop_lag_ms=0.0,
        logprob_diff=None,
        mismatch=await mismatch_of(batch, report),
    )


def _stats(batch: Batch, before: tuple[TokenCounts, GroupCounts]) -> SchedulerStats:
    """Return the accounts after a step in which every group was trained, and nothing is in flight."""
    tokens, groups = before
    generated = sum(group.num_tokens for group in batch.groups)
    trained = sum(group.num_trained for group in batch.groups)
    num_groups = len(batch.groups)
    return SchedulerStats(
        tokens=replace(
            tokens,
            generated=tokens.generated + generated,
            trained=tokens.trained + trained,
            masked=tokens.masked + generated - trained,
        ),
        groups=replace(groups, admitted=groups.admitted + num_groups, trained=groups.trained + num_groups),
        filter_reasons={},
        samples_in_flight=0,
        slots=0,
        acceptance=1.0,
        returned=0,
        retries=0,
        aborts=0,
        slot_limit=0,
        weights=Weights(version=0, step=0),
        lengths=LengthStats(
            finished=0,
            cut=0,
            trained=0,
            filtered=0,
            dropped=0,
            started=None,
            let_through=None,
            fair=None,
            bias=0.0,
            chance=0.0,
        ),
    )
