"""One case of ``benchmarks.controller``, in a separate process: the whole pipeline against servers that cost nothing.

Everything on the controller's side is the product's: scheduler, sampler, retries, SGLang client, HTTP, sockets, text,
timeline, metrics.  Only the trainer and the weight updates take no time, and the reward is a constant.

Reads a ``Case`` as JSON from its first argument and writes a ``CaseMeasurement`` as JSON to the standard output.
"""

import asyncio
import contextlib
import cProfile
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import uvloop

from asyncrl.app.gc_tuning import freeze_startup_objects
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.loop_lag import watch_loop
from asyncrl.metrics.reporter import Reporter
from asyncrl.metrics.sinks import JsonlSink
from asyncrl.metrics.timeline import TimelineFile
from asyncrl.pipeline.parts import Parts
from asyncrl.pipeline.run import train
from benchmarks.controller.meters import LAG_PERIOD_S, AllLags, GcPauses, percentiles_ms, shares, starved_s
from benchmarks.controller.parts import parts_for, plan_for

SETTLE_S = 1.0
"""Seconds after the one full collection of a run.  It stops the loop for 0.2 s; then the queued work is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The settings of one measurement."""

    num_tokens: int
    """Tokens of each answer."""
    in_flight: int
    interval: int
    """Tokens per streamed event."""
    tokens_per_s: float
    """Tokens per second of all servers together."""
    warmup_s: float
    """Seconds before the measurement, in which connections are opened."""
    measured_s: float
    num_servers: int
    is_plain: bool = False
    """Whether the servers have no plug-in that packs their answers."""
    is_profiled: bool = False
    is_gc_tuned: bool = True
    """Whether the garbage collector is tuned as in the product: startup objects frozen, old ones scanned less often."""

    @property
    def answer_s(self) -> float:
        """Seconds from the first event of an answer to its last."""
        return self.in_flight * self.num_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseMeasurement:
    """The measured cost of a case.  Samples are counted by their tokens, as many lie only partly inside the window."""

    samples: float
    seconds: float
    cpu_s: float
    """CPU seconds of the controller's process, all threads."""
    starved_s: float
    """Seconds in which its main thread was ready and had no CPU; the lag includes them."""
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    gc_s: float
    """Seconds in the garbage collector."""
    gc_max_ms: float
    peak_mib: float
    """Peak memory of the process, in MiB."""
    in_flight: int
    """Slots in use at the end."""
    lost: int
    """Tokens of the whole run that were neither trained nor held at the end.  Expected: 0."""
    shares: dict[str, float]
    """Shares of the CPU time by package; empty unless profiled."""


def main() -> None:
    """Measure the case in the first argument."""
    sys.stdout.write(orjson.dumps(asdict(measure(Case(**orjson.loads(sys.argv[1]))))).decode() + "\n")


def measure(case: Case) -> CaseMeasurement:
    """Start the servers, run the pipeline against them, measure, and stop them."""
    with contextlib.ExitStack() as stack:
        urls = tuple(stack.enter_context(_server(case)) for _ in range(case.num_servers))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(case, urls, folder))


@contextlib.contextmanager
def _server(case: Case) -> Iterator[str]:
    options = {
        "num-tokens": case.num_tokens,
        "interval": case.interval,
        "answer-s": case.answer_s,
        "num-cut": max(1, case.in_flight // case.num_servers),
    }
    words = [f"--{name}={value}" for name, value in options.items()] + ["--plain"] * case.is_plain
    command = (sys.executable, str(Path(__file__).with_name("answering_server.py")), *words)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()  # ends the server


async def _run(case: Case, urls: tuple[str, ...], folder: Path) -> CaseMeasurement:
    lags = AllLags()
    async with HttpClient() as http, contextlib.AsyncExitStack() as stack:
        timeline = TimelineFile(folder, asyncio.get_running_loop().time())
        stack.callback(timeline.close)
        reporter = Reporter([JsonlSink(folder)])
        stack.callback(reporter.close)
        parts = parts_for(case.in_flight, case.num_tokens, http, urls, timeline, lags)

        def report(facts: StepFacts) -> None:
            reporter.step(facts)

        async with asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(train(parts, plan_for(folder), report), name="run"),
                tasks.create_task(watch_loop(lags, LAG_PERIOD_S), name="loop-lag"),
            ]
            await asyncio.sleep(case.warmup_s)
            measured = await _window(case, parts, lags)
            for task in work:
                task.cancel()
    return measured


async def _window(case: Case, parts: Parts, lags: AllLags) -> CaseMeasurement:
    if case.is_gc_tuned:
        freeze_startup_objects()
        await asyncio.sleep(SETTLE_S)
    profile = cProfile.Profile(time.process_time) if case.is_profiled else None
    collector = GcPauses()
    lags.late_s.clear()
    tokens, began, starved, cpu = _generated(parts), time.monotonic(), starved_s(), time.process_time()
    with collector.watched(), profile or contextlib.nullcontext():
        await asyncio.sleep(case.measured_s)
    cpu_s, seconds = time.process_time() - cpu, time.monotonic() - began
    lag_p50_ms, lag_p99_ms, lag_max_ms = percentiles_ms(lags.late_s)
    account = parts.scheduler.stats().tokens
    return CaseMeasurement(
        samples=(_generated(parts) - tokens) / case.num_tokens,
        seconds=seconds,
        cpu_s=cpu_s,
        starved_s=starved_s() - starved,
        lag_p50_ms=lag_p50_ms,
        lag_p99_ms=lag_p99_ms,
        lag_max_ms=lag_max_ms,
        gc_s=sum(collector.seconds),
        gc_max_ms=1000 * max(collector.seconds, default=0.0),
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        in_flight=parts.slots.in_use,
        lost=account.generated - account.trained - account.held,
        shares=shares(profile) if profile else {},
    )


def _generated(parts: Parts) -> int:
    return parts.scheduler.stats().tokens.generated


if __name__ == "__main__":
    main()
