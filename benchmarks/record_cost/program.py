"""train_async.py whose records are written in every second block of steps alone.

python -m benchmarks.record_cost.program rollouts|journal BLOCK FLAGS...
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil

from asyncrl.app import entry
from asyncrl.buffer import Dispatch
from asyncrl.metrics.sinks import JsonlSink, Row
from asyncrl.pipeline.scheduling.recorder import Recorder
from asyncrl.rollout_log.files import RolloutFiles
from asyncrl.types import Batch, ScoredGroup, TrainReport

DRIVER_S, OTHERS_S = "cpu/driver_s", "cpu/others_s"
"""Names of numbers in each row: seconds of CPU time so far, of the driver and of all processes below it."""


def is_with(step: int, block: int) -> bool:
    """Return whether the records of a step are written."""
    return step // block % 2 == 0


def patch_rollouts(block: int) -> None:
    """Write the files of samples in every second block of steps."""
    write = RolloutFiles.write

    def sometimes(self: RolloutFiles, batch: Batch, report: TrainReport) -> None:
        if is_with(batch.step, block):
            write(self, batch, report)

    RolloutFiles.write = sometimes  # type: ignore[method-assign]


def patch_journal(block: int) -> None:
    """Record events in the journal, and wait for the disk, in every second block of steps.

    A block begins when the batch before it is taken.  Such a journal has holes and restores nothing.
    """
    now = [0]
    taken, finished = Recorder.taken, Recorder.finished

    def note(self: Recorder, batch: Batch) -> None:
        now[0] = batch.step + 1
        if is_with(now[0], block):
            taken(self, batch)

    async def sometimes(self: Recorder, *groups: tuple[Dispatch, ScoredGroup]) -> None:
        if is_with(now[0], block):
            await finished(self, *groups)

    def only_if(method: Callable[..., None]) -> Callable[..., None]:
        def sometimes(*words: Any, **more: Any) -> None:
            if is_with(now[0], block):
                method(*words, **more)

        return sometimes

    Recorder.taken = note  # type: ignore[method-assign]
    Recorder.finished = sometimes  # type: ignore[method-assign]
    for name in ("admitted", "filtered", "left", "wasted", "trained", "published"):
        setattr(Recorder, name, only_if(getattr(Recorder, name)))


def add_cpu_times() -> None:
    """Write the CPU times so far into each row of metrics.jsonl."""
    write = JsonlSink.write

    def more(self: JsonlSink, row: Row) -> None:
        write(self, {**row, DRIVER_S: time.process_time(), OTHERS_S: _others_s()})

    JsonlSink.write = more  # type: ignore[method-assign]


def _others_s() -> float:
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


PATCHES = {"rollouts": patch_rollouts, "journal": patch_journal}


def main(argv: Sequence[str]) -> int:
    """Run with the flags after the first two words; return the exit code."""
    subject, block, *flags = argv
    PATCHES[subject](int(block))
    add_cpu_times()
    return entry.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
