"""train_async.py whose records are written in every second block of steps alone.

python -m benchmarks.record_cost.program rollouts|journal BLOCK FLAGS...
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from asyncrl.app import entry
from asyncrl.buffer import Dispatch
from asyncrl.buffer.journal.journal import Journal
from asyncrl.buffer.journal.writer import JournalWriter
from asyncrl.metrics.sinks import JsonlSink, Row
from asyncrl.pipeline.scheduling.recorder import Recorder
from asyncrl.rollout_log.files import RolloutFiles
from asyncrl.types import Batch, ScoredGroup, TrainReport

DRIVER_S, OTHERS_S, RECORDS_S = "cpu/driver_s", "cpu/others_s", "cpu/records_s"
"""Names of numbers in each row: CPU seconds so far of the driver, of all processes below it, and of records in it."""


class Spent:
    """CPU time that threads of this process spent in some functions, by the clocks of these threads."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._seconds = 0.0
        self._clocks: list[int] = []

    def timed(self, owner: type, *names: str) -> None:
        """Count the time in these methods of ``owner``.  A call within another one counts once."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def thread(self, owner: type, name: str) -> None:
        """Count all time of the thread in which this method of ``owner`` runs."""
        method = getattr(owner, name)

        def noted(*words: Any, **more: Any) -> Any:
            self._clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            return method(*words, **more)

        setattr(owner, name, noted)

    def seconds(self) -> float:
        """Return the time so far."""
        return self._seconds + sum(time.clock_gettime(clock) for clock in self._clocks)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*words: Any, **more: Any) -> Any:
            with self._outermost():
                return method(*words, **more)

        return timed

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        if getattr(self._here, "is_in", False):
            yield
            return
        self._here.is_in, start = True, time.thread_time()
        try:
            yield
        finally:
            self._here.is_in = False
            self._seconds += time.thread_time() - start


def is_with(step: int, block: int) -> bool:
    """Return whether the records of a step are written."""
    return step // block % 2 == 0


def patch_rollouts(block: int, spent: Spent) -> None:
    """Write the files of samples in every second block of steps."""
    spent.timed(RolloutFiles, "write", "_write")
    write = RolloutFiles.write

    def sometimes(self: RolloutFiles, batch: Batch, report: TrainReport) -> None:
        if is_with(batch.step, block):
            write(self, batch, report)

    RolloutFiles.write = sometimes  # type: ignore[method-assign]


def patch_journal(block: int, spent: Spent) -> None:
    """Record events in the journal, and wait for the disk, in every second block of steps.

    A block begins when the batch before it is taken.  Such a journal has holes and restores nothing.
    """
    spent.timed(Recorder, "admitted", "filtered", "left", "wasted", "trained", "published", "taken", "hurry_if_needed")
    spent.timed(Journal, "append", "_release")
    spent.thread(JournalWriter, "run")
    now = [0]
    taken, finished = Recorder.taken, Recorder.finished

    def note(self: Recorder, batch: Batch) -> None:
        now[0] = batch.step + 1
        if is_with(now[0], block):
            taken(self, batch)

    async def sometimes(self: Recorder, dispatch: Dispatch, group: ScoredGroup) -> None:
        if is_with(now[0], block):
            await finished(self, dispatch, group)

    def only_if(method: Callable[..., None]) -> Callable[..., None]:
        def sometimes(*words: Any, **more: Any) -> None:
            if is_with(now[0], block):
                method(*words, **more)

        return sometimes

    Recorder.taken = note  # type: ignore[method-assign]
    Recorder.finished = sometimes  # type: ignore[method-assign]
    for name in ("admitted", "filtered", "left", "wasted", "trained", "published"):
        setattr(Recorder, name, only_if(getattr(Recorder, name)))


def add_cpu_times(spent: Spent) -> None:
    """Write the CPU times so far into each row of metrics.jsonl."""
    write = JsonlSink.write

    def more(self: JsonlSink, row: Row) -> None:
        write(self, {**row, DRIVER_S: time.process_time(), OTHERS_S: _others_s(), RECORDS_S: spent.seconds()})

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
    spent = Spent()
    PATCHES[subject](int(block), spent)
    add_cpu_times(spent)
    return entry.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
