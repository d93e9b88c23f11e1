"""The cost of a run's files of samples: lag of the event loop, CPU time and bytes.

    uv run python -m benchmarks.rollout_files              steps of 128 samples of 8,192 tokens
    uv run python -m benchmarks.rollout_files --check      exit code 1 if a limit is exceeded

The loop sleeps for a millisecond at a time, first without and then with files being written.  On a busy machine other
programs cause most of the lag, as the column ``starved`` shows: it is the share of time in which the loop was ready to
run and had no CPU.  As root on Linux, ``chrt -r 1 python -m benchmarks.rollout_files`` measures without other programs.
"""

import asyncio
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from asyncrl.app.gc_tuning import freeze_startup_objects
from asyncrl.metrics.loop_lag import watch_loop
from asyncrl.rollout_log.files import RolloutFiles, file_of
from asyncrl.types import (
    Batch,
    FinishReason,
    GroupId,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    TrainReport,
    Weights,
)
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.controller.meters import AllLags, percentiles_ms, starved_s

GROUP_SIZE = 8
"""Samples per prompt, as in slime's examples."""
VOCABULARY = 151_936
"""Token ids, as many as Qwen3's."""
PERIOD_S = 0.001
"""Seconds between two measurements of the lag."""
FINISHED_S = 0.005
"""Seconds between two looks whether a file is written."""
MAX_LOOP_US = 100.0
"""Most microseconds of the event loop per sample."""
MAX_LAG_P99_MS = 5.0
"""Most milliseconds of lag at the 99th percentile while files are written."""
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The lag of the event loop, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    starved: float
    """Share of the time in which the loop had no CPU although it was ready."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of writing all steps."""

    loop_us: float
    """Microseconds for which handing over a sample took the event loop."""
    cpu_s: float
    """Seconds of CPU time of the thread, per million tokens."""
    file_s: float
    """Seconds until a step's file was there."""
    bytes_per_token: float


def main(argv: Sequence[str]) -> int:
    """Measure, show and check; returns the exit code."""
    parser = parser_of("rollout_files", __doc__)
    add_option(parser, "--samples", int, f"samples per step, in groups of {GROUP_SIZE}", 128)
    add_option(parser, "--tokens", int, "tokens per sample", 8192)
    add_option(parser, "--steps", int, "steps to write", 8)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a limit is exceeded")
    asked = parser.parse_args(argv)
    batch = made_batch(asked.samples, asked.tokens)
    freeze_startup_objects()  # as a run does
    idle, writing, cost = uvloop.run(measured(batch, made_report(batch), asked.steps))
    console = Console()
    console.print_json(data=circumstances("rollout_files", argv))
    console.print(table({"no files": idle, "files": writing}))
    console.print(
        f"event loop {cost.loop_us:.1f} us per sample, thread {cost.cpu_s:.3f} s of CPU time per million tokens, "
        f"{cost.file_s:.2f} s per step, {cost.bytes_per_token:.1f} bytes per token"
    )
    found = problems(writing, cost) if asked.check else []
    for problem in found:
        console.print(f"[red]{problem}")
    return 1 if found else 0


def problems(writing: Lag, cost: Cost) -> list[str]:
    """Name the figures that exceed their limits."""
    lag = f"the lag is {writing.p99_ms:.1f} ms at the 99th percentile, more than {MAX_LAG_P99_MS:g}"
    loop = f"a sample takes {cost.loop_us:.0f} us of the event loop, more than {MAX_LOOP_US:g}"
    return [*[lag] * (writing.p99_ms > MAX_LAG_P99_MS), *[loop] * (cost.loop_us > MAX_LOOP_US)]


def made_batch(num_samples: int, num_tokens: int) -> Batch:
    """Make a batch of random tokens, which are the hardest to compress."""
    numbers = random.Random(1)
    weights = Weights(version=0, step=0)

    def scored(index: int) -> ScoredSample:
        sample = Sample(
            index=index,
            token_ids=tuple(numbers.choices(range(VOCABULARY), k=num_tokens)),
            logprobs=array("f", [-numbers.random() for _ in range(num_tokens)]),
            spans=(Span(weights=weights, start=0, stop=num_tokens),),
            text="".join(numbers.choices(("the ", "of ", "seven ", "x"), k=num_tokens)),
            finish=FinishReason.STOP,
            seconds=1.0,
        )
        return ScoredSample(sample=sample, reward=float(index % 2), loss_mask=(1,) * num_tokens)

    groups = (
        ScoredGroup(
            group_id=GroupId(number),
            prompt=Prompt(row=number, epoch=0, text="1+1=", token_ids=(1, 2, 3), label="2"),
            dispatched=weights,
            samples=tuple(map(scored, range(GROUP_SIZE))),
        )
        for number in range(-(-num_samples // GROUP_SIZE))
    )
    return Batch(step=0, groups=tuple(groups))


def made_report(batch: Batch) -> TrainReport:
    """Make the report of a trainer: arrays, as from a rank."""
    samples = [scored.sample for group in batch.groups for scored in group.samples]
    return TrainReport(
        loss=0.0,
        grad_norm=1.0,
        clip_fraction=0.0,
        entropy=1.0,
        learning_rate=1e-6,
        seconds=1.0,
        logprobs=tuple(array("f", [each - 0.01 for each in sample.logprobs]) for sample in samples),
        advantages=tuple(array("f", [0.5]) * len(sample.token_ids) for sample in samples),
    )


async def measured(batch: Batch, report: TrainReport, num_steps: int, idle_s: float = 2.0) -> tuple[Lag, Lag, Cost]:
    """Measure the lag without files for ``idle_s`` seconds and with files, and their cost."""
    with tempfile.TemporaryDirectory() as folder:
        files = RolloutFiles(Path(folder))
        await _write(files, batch, report)  # the first file imports parts of pyarrow
        handed_s = 0.0

        async def write_all() -> None:
            nonlocal handed_s
            for _ in range(num_steps):
                handed_s += await _write(files, batch, report)

        idle = await _lag_during(lambda: asyncio.sleep(idle_s))
        before = _cpu_s()
        writing = await _lag_during(write_all)
        cpu_s = _cpu_s() - before
        files.close()
        num_bytes = file_of(Path(folder), batch.step).stat().st_size
    num_samples = sum(len(group.samples) for group in batch.groups)
    num_tokens = sum(group.num_tokens for group in batch.groups)
    cost = Cost(
        loop_us=MILLION * handed_s / (num_steps * num_samples),
        cpu_s=cpu_s * MILLION / (num_steps * num_tokens),
        file_s=writing.seconds / num_steps,
        bytes_per_token=num_bytes / num_tokens,
    )
    return idle, writing, cost


async def _write(files: RolloutFiles, batch: Batch, report: TrainReport) -> float:
    """Write a step; return the seconds for which the call took the loop."""
    start = time.thread_time()
    files.write(batch, report)
    handed_s = time.thread_time() - start
    while files.num_waiting:  # noqa: ASYNC110 (a thread ends the wait)
        await asyncio.sleep(FINISHED_S)
    return handed_s


def _cpu_s() -> float:
    """Seconds of CPU time of all threads but this one: that of the files, and those of its libraries."""
    return time.process_time() - time.thread_time()


async def _lag_during(work: Callable[[], Awaitable[None]]) -> Lag:
    lags, began, starved = AllLags(), time.monotonic(), starved_s()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch_loop(lags, PERIOD_S, time.perf_counter))  # uvloop's clock has milliseconds
        await work()
        watching.cancel()
    seconds = time.monotonic() - began
    p50, p99, longest = percentiles_ms(lags.late_s, PERIOD_S)
    share = (starved_s() - starved) / seconds
    return Lag(p50_ms=p50, p99_ms=p99, max_ms=longest, starved=share, seconds=seconds)


def table(rows: dict[str, Lag]) -> Table:
    """Return a table of the lags, one per line."""
    shown = Table("", "lag p50 ms", "p99", "max", "starved", "seconds")
    for name, lag in rows.items():
        lags = (f"{each:.2f}" for each in (lag.p50_ms, lag.p99_ms, lag.max_ms))
        shown.add_row(name, *lags, f"{lag.starved:.1%}", f"{lag.seconds:.1f}")
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
