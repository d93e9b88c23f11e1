"""The cost of a run's journal: bytes, CPU time, lag of the event loop, and the time of a recovery.

    uv run python -m benchmarks.journal              30,000 tokens per second, then as fast as the disk allows
    uv run python -m benchmarks.journal --check      exit code 1 if a limit is exceeded

The loop sleeps for a millisecond at a time, first without and then with a journal.  On a busy machine other programs
cause most of the lag, as the column ``starved`` shows: it is the share of time in which the loop was ready to run and
had no CPU.  As root on Linux, ``chrt -r 1 python -m benchmarks.journal`` measures without other programs.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Buffer, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from asyncrl.app.gc_tuning import freeze_startup_objects
from asyncrl.buffer import Dispatch
from asyncrl.buffer.journal import Admitted, Finished, Journal, PromptPlace, Snapshot, recover
from asyncrl.buffer.journal.segments import Disk
from asyncrl.metrics.loop_lag import watch_loop
from asyncrl.types import GroupId, ScoredGroup
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.controller.meters import AllLags, percentiles_ms, starved_s
from benchmarks.rollout_files.__main__ import made_batch

GROUP_SIZE = 8
"""Samples of a group, as ``made_batch`` makes them."""
NUM_DIFFERENT = 32
"""Groups that are written again and again, under other ids."""
PERIOD_S = 0.001
"""Seconds between two measurements of the lag."""
MOST_IN_FLIGHT = 64
"""Groups that wait for the disk in the fast part."""
MAX_BYTES_PER_TOKEN = 9.0
"""Most bytes per token without the texts of the answers."""
MAX_CPU_MS = 100.0
"""Most milliseconds of CPU time of the thread per million tokens, as fast as the disk allows, at 1,024 tokens per
sample.  The results page has 39 to 52, and 33 to 35 at 8,192 tokens per sample."""
MAX_LAG_P99_MS = 2.0
"""Most milliseconds of lag at the 99th percentile at the given rate."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The lag of the event loop in milliseconds, and the CPU time of the thread."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    starved: float
    """Share of the time in which the loop had no CPU although it was ready."""
    seconds: float
    cpu_s: float
    """Seconds of CPU time of all threads but the loop's."""
    num_tokens: int = 0

    @property
    def cpu_ms_per_million(self) -> float:
        """Milliseconds of CPU time per million tokens."""
        return 1000 * self.cpu_s * MILLION / max(1, self.num_tokens)


class TimedDisk(Disk):
    """Measures the commits: the writes and the sync after them."""

    def __init__(self) -> None:
        self.commits_s: list[float] = []
        self._spent_s = 0.0

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        """See ``Disk``."""
        start = time.perf_counter()
        written = super().write(descriptor, buffers)
        self._spent_s += time.perf_counter() - start
        return written

    def sync(self, descriptor: int) -> None:
        """See ``Disk``."""
        start = time.perf_counter()
        super().sync(descriptor)
        self.commits_s.append(self._spent_s + time.perf_counter() - start)
        self._spent_s = 0.0


class Load:
    """Groups that end one after another, as a scheduler would append them."""

    def __init__(self, journal: Journal, groups: Sequence[ScoredGroup]) -> None:
        self._journal = journal
        self._groups = groups
        self.num_groups = 0
        self.append_s = 0.0
        """Seconds of the event loop within ``append``."""

    async def one(self) -> None:
        """Append the records of one group and wait until they are on the disk."""
        group_id = GroupId(self.num_groups)
        group = replace(self._groups[self.num_groups % len(self._groups)], group_id=group_id)
        self.num_groups += 1
        start = time.thread_time()
        place = PromptPlace(epoch=0, row=group_id)
        self._journal.append(Admitted(group_id=group_id, place=place, prompts_taken=group_id, last_taken=(0, group_id)))
        dispatch = Dispatch(order=group_id, deadline=0, group_id=group_id)
        sequence = self._journal.append(Finished(dispatch=dispatch, group=group))
        self.append_s += time.thread_time() - start
        await self._journal.durable(sequence)

    async def at_rate(self, seconds: float, groups_per_s: float) -> None:
        """Append groups at a steady rate."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as waits:
            for number in range(int(seconds * groups_per_s)):
                await asyncio.sleep(max(0.0, start + number / groups_per_s - time.monotonic()))
                waits.create_task(self.one())

    async def at_once(self, num_groups: int) -> None:
        """Append groups as fast as the disk allows."""
        room = asyncio.Semaphore(MOST_IN_FLIGHT)

        async def one() -> None:
            async with room:
                await self.one()

        async with asyncio.TaskGroup() as waits:
            for _ in range(num_groups):
                waits.create_task(one())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All that is measured."""

    idle: Lag
    paced: Lag
    fast: Lag
    append_us: float
    """Microseconds of the event loop for the two records of a group."""
    paced_commits_s: Sequence[float]
    bytes_per_token: float
    text_bytes_per_token: float
    recovery_s: float
    """Seconds of a recovery per million tokens."""


def main(argv: Sequence[str]) -> int:
    """Measure, show and check; returns the exit code."""
    parser = parser_of("journal", __doc__)
    add_option(parser, "--tokens", int, f"tokens per sample, of which a group has {GROUP_SIZE}", 1024)
    add_option(parser, "--rate", int, "tokens per second of the steady part", 30_000)
    add_option(parser, "--seconds", float, "seconds of the steady part", 20.0)
    add_option(parser, "--millions", float, "millions of tokens of the fast part", 4.0)
    add_option(parser, "--folder", Path, "folder on the disk to measure", Path(tempfile.gettempdir()))
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    asked = parser.parse_args(argv)
    groups = made_batch(NUM_DIFFERENT * GROUP_SIZE, asked.tokens).groups
    freeze_startup_objects()  # as a run does
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        figures = uvloop.run(measured(Path(folder), groups, asked.rate, asked.seconds, asked.millions))
    console = Console()
    console.print_json(data=circumstances("journal", argv))
    console.print(lags_table(figures))
    console.print(costs_table(figures))
    found = problems(figures) if asked.check else []
    for problem in found:
        console.print(f"[red]{problem}")
    return 1 if found else 0


def problems(figures: Figures) -> list[str]:
    """Name the figures that exceed their limits."""
    return [
        f"{name}: {value:.1f}, more than {limit:g}"
        for name, value, limit in (
            ("lag at the 99th percentile, ms", figures.paced.p99_ms, MAX_LAG_P99_MS),
            ("CPU time per million tokens, ms", figures.fast.cpu_ms_per_million, MAX_CPU_MS),
            ("bytes per token without texts", figures.bytes_per_token, MAX_BYTES_PER_TOKEN),
        )
        if value > limit
    ]


async def measured(
    folder: Path, groups: Sequence[ScoredGroup], rate: float, seconds: float, millions: float
) -> Figures:
    """Measure the loop without a journal for a fifth of ``seconds``, then at the rate, then as fast as possible."""
    disk = TimedDisk()
    journal = Journal(folder, 1, delivered=lambda: 0, disk=disk)
    await journal.durable(journal.begin_segment(Snapshot(step=0, state={}, held=())))
    load = Load(journal, groups)
    group_tokens = groups[0].num_tokens
    idle = await _lag_during(lambda: asyncio.sleep(seconds / 5))
    disk.commits_s.clear()
    paced = await _lag_during(lambda: load.at_rate(seconds, rate / group_tokens))
    paced = replace(paced, num_tokens=load.num_groups * group_tokens)
    paced_commits_s, num_before = list(disk.commits_s), load.num_groups
    fast = await _lag_during(lambda: load.at_once(int(millions * MILLION / group_tokens)))
    fast = replace(fast, num_tokens=(load.num_groups - num_before) * group_tokens)
    await journal.close()
    if journal.problem is not None:
        raise RuntimeError(f"the journal is off: {journal.problem}")
    return _with_sizes(folder, groups, load, idle, paced, fast, paced_commits_s)


def _with_sizes(
    folder: Path,
    groups: Sequence[ScoredGroup],
    load: Load,
    idle: Lag,
    paced: Lag,
    fast: Lag,
    paced_commits_s: Sequence[float],
) -> Figures:
    num_tokens = load.num_groups * groups[0].num_tokens
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    text_bytes = sum(
        len(scored.sample.text.encode())
        for number in range(load.num_groups)
        for scored in groups[number % len(groups)].samples
    )
    start = time.perf_counter()
    recovered = recover(folder, 0)
    recovery_s = time.perf_counter() - start
    if recovered is None or len(recovered.buffered) != load.num_groups:
        raise RuntimeError(f"not all of the {load.num_groups} groups are recovered")
    return Figures(
        idle=idle,
        paced=paced,
        fast=fast,
        append_us=MILLION * load.append_s / load.num_groups,
        paced_commits_s=paced_commits_s,
        bytes_per_token=(num_bytes - text_bytes) / num_tokens,
        text_bytes_per_token=text_bytes / num_tokens,
        recovery_s=recovery_s * MILLION / num_tokens,
    )


async def _lag_during(work: Callable[[], Awaitable[None]]) -> Lag:
    lags, began, starved, cpu_s = AllLags(), time.monotonic(), starved_s(), _cpu_s()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch_loop(lags, PERIOD_S, time.perf_counter))  # uvloop's clock has milliseconds
        await work()
        watching.cancel()
    seconds = time.monotonic() - began
    p50, p99, longest = percentiles_ms(lags.late_s, PERIOD_S)
    share = (starved_s() - starved) / seconds
    return Lag(p50_ms=p50, p99_ms=p99, max_ms=longest, starved=share, seconds=seconds, cpu_s=_cpu_s() - cpu_s)


def _cpu_s() -> float:
    """Seconds of CPU time of all threads but this one."""
    return time.process_time() - time.thread_time()


def lags_table(figures: Figures) -> Table:
    """Return a table of the lags, one part per line."""
    shown = Table("", "lag p50 ms", "p99", "max", "starved", "tokens per s", "thread's CPU ms per million")
    rows = {"no records": figures.idle, "at the rate": figures.paced, "as fast as possible": figures.fast}
    for name, lag in rows.items():
        lags = (f"{each:.2f}" for each in (lag.p50_ms, lag.p99_ms, lag.max_ms))
        cpu = f"{lag.cpu_ms_per_million:.0f}" if lag.num_tokens else ""
        shown.add_row(name, *lags, f"{lag.starved:.1%}", f"{lag.num_tokens / lag.seconds:,.0f}", cpu)
    return shown


def costs_table(figures: Figures) -> Table:
    """Return a table of the other figures."""
    shown = Table("", "")
    commits = sorted(figures.paced_commits_s)
    shown.add_row("bytes per token, without texts", f"{figures.bytes_per_token:.2f}")
    shown.add_row("bytes of texts per token", f"{figures.text_bytes_per_token:.2f}")
    shown.add_row("commits at the rate", f"{len(commits)}")
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        shown.add_row(f"ms per commit, {name}", f"{1000 * commits[int(share * (len(commits) - 1))]:.2f}")
    shown.add_row("event loop, us per group", f"{figures.append_us:.1f}")
    shown.add_row("recovery, s per million tokens", f"{figures.recovery_s:.2f}")
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
