"""Many lives: in this process or in several, with counts of what happened and the seeds that broke an oracle."""

import contextlib
import gc
import logging
import multiprocessing
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

from asyncrl.sim.faults.life import live
from asyncrl.sim.faults.world.plan import drawn

TOGETHER = 10
"""Lives between two collections of garbage.  asyncio visits all tasks that are not collected when a life ends."""
MOST_AT_ONCE = 100
"""Lives between two reports of a worker."""
MEMORY_DISK = Path("/dev/shm")
"""A file system in memory, where there is one: ``fsync`` costs nothing there."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """The result of some lives."""

    num_lives: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    """Faults that had an effect, by kind."""
    ends: Counter[str] = field(default_factory=Counter)
    """Ends of processes: done, killed, or the name of an error."""
    violations: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Oracle and text, by seed."""
    num_resumed: int = 0
    """Lives of more than one process."""
    num_recovered: int = 0
    """Processes that recovered from a journal."""
    num_with_journal: int = 0
    """Lives with a journal."""
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    """Seconds of processors: on a busy machine, fewer than those of a clock."""

    def add(self, other: "Findings") -> None:
        """Add the result of other lives."""
        self.num_lives += other.num_lives
        self.happened.update(other.happened)
        self.ends.update(other.ends)
        self.violations.update(other.violations)
        self.num_resumed += other.num_resumed
        self.num_recovered += other.num_recovered
        self.num_with_journal += other.num_with_journal
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s


@contextlib.contextmanager
def simulating() -> Iterator[Path]:
    """Prepare this process for lives, and yield a folder for their disks.

    No logging, and no cycle collector during a life.
    """
    scratch = Path(tempfile.mkdtemp(prefix="asyncrl-faults-", dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None))
    level, had_gc = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield scratch
        gc.collect()
    finally:
        gc.unfreeze()
        if had_gc:
            gc.enable()
        logging.disable(level)
        shutil.rmtree(scratch, ignore_errors=True)


def hunt(seeds: Iterable[int], scratch: Path, *, until_found: bool = False) -> Findings:
    """Live the lives of ``seeds`` in this process, which is ``simulating``; with ``until_found`` to the first find."""
    found, start = Findings(), time.process_time()
    for seed in seeds:
        setting, faults = drawn(seed)
        outcome = live(setting, faults, scratch)
        found.num_lives += 1
        found.happened.update(outcome.happened)
        found.ends.update(end.partition(":")[0].removeprefix("error ") for end in outcome.ends)
        found.num_resumed += outcome.num_processes > 1
        found.num_recovered += outcome.num_recovered
        found.num_with_journal += setting.has_journal
        found.virtual_s += outcome.seconds
        if outcome.violation is not None:
            found.violations[seed] = outcome.violation.oracle, str(outcome.violation)
            if until_found:
                break
        if found.num_lives % TOGETHER == 0:
            gc.collect()
    found.cpu_s = time.process_time() - start
    return found


def hunt_alone(seeds: tuple[int, ...]) -> Findings:
    """Live the lives of ``seeds`` in a worker process."""
    with simulating() as scratch:
        return hunt(seeds, scratch)


def hunt_together(
    seeds: Iterable[int], num_workers: int, report: Callable[[Findings, float], None], limit_s: float | None = None
) -> Findings:
    """Live in ``num_workers`` processes.  ``report`` gets all findings so far and the seconds that have passed.

    Ends with the first ``MOST_AT_ONCE`` lives that are over ``limit_s`` seconds after the start, or later.
    """
    found, start = Findings(), time.perf_counter()
    batches = batched(seeds, MOST_AT_ONCE)
    if num_workers == 1:
        with simulating() as scratch:
            for batch in batches:
                found.add(hunt(batch, scratch))
                report(found, time.perf_counter() - start)
                if limit_s is not None and time.perf_counter() - start > limit_s:
                    break
        return found
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as workers:
        for each in workers.map(hunt_alone, batches):
            found.add(each)
            report(found, time.perf_counter() - start)
            if limit_s is not None and time.perf_counter() - start > limit_s:
                workers.shutdown(wait=True, cancel_futures=True)
                break
    return found
