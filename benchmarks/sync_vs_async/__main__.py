"""The gain of asynchronous training: several arrangements on the same GPUs, with the same model, prompts and lengths.

    uv run python -m benchmarks.sync_vs_async --trainer-gpus 1 --engine-gpus 1 --model 1.7b                 two GPUs
    uv run python -m benchmarks.sync_vs_async --trainer-gpus 1 --engine-gpus 3 --arrangements sync S=2 S=4 S=8
    uv run python -m benchmarks.sync_vs_async --trainer-gpus 2 --engine-gpus 0 --arrangements sync-colocate
    uv run python -m benchmarks.sync_vs_async --show a/results.json b/results.json --out both               joint table
    uv run python -m benchmarks.sync_vs_async --device cpu --model tiny --groups 4 --group-size 2 --longest 128 \\
        --concurrency 16 --prompt-tokens 16 --max-tokens-per-gpu 512                                        any machine

    sync       collect a batch, train on it, publish, and only then generate again (S = 0)
    sync-colocate
               the same on all GPUs, on which training and generation alternate (--colocate)
    one-step   batch t+1 is generated while batch t is trained; both must be done before an update (slime's train_async)
    S=N        asyncrl: no trained token is more than N steps old; published at once, samples in flight continue
    ...-no-replay
               the same, with the trainer of a mixture choosing experts itself instead of replaying the engines' choice

Engines (SGLang), trainer (Megatron under Ray) and weight updates are real.  They are started once, and a second time
for sync-colocate.  Each arrangement then runs the product's loop over them, with a separate scheduler.  A model of
random weights generates answers of forced length: log-normal, with the 95th percentile at 8 times the median, drawn
from the seed by prompt and place in the group.  All arrangements measure the same prompts.  Rewards are random and
nothing is filtered.

    ideal          = GPUs / (trainer GPUs / R + engine GPUs / G)        all useful GPU-seconds divided by GPUs
    split's ideal  = min(R, G)                                          at this split, if no side ever idled
    R              = trained tokens per second in train() of the best arrangement
    G              = tokens per second of the engines with every slot taken all the time, measured first and alone
                     (--full-s); or the best rate of any S >= 2 while engines have work, if that is higher

On a CPU, engines and trainer take cores from each other, and the ideal means little.  Exit codes: 0, 1 not everything
was measured, 2 the options are wrong.  Results are written after each run; the table comes last.
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import uvloop
from rich.console import Console

from asyncrl.app.gc_tuning import freeze_startup_objects
from asyncrl.app.signals import Signals
from asyncrl.capacity.layout import check_layout
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.engines.cluster.deployment import deployed
from asyncrl.engines.cluster.session import end, ray_session
from asyncrl.errors import ConfigError, EngineError, plainly
from asyncrl.metrics.logs import open_logging
from asyncrl.metrics.loop_lag import watch_loop
from asyncrl.metrics.timeline import TIMELINE_FILE, TimelineFile, parts_of
from asyncrl.models.shape import read_shape
from benchmarks.common.circumstances import circumstances
from benchmarks.common.devices import need
from benchmarks.common.parallel_options import parallel_of
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.arrangements import Arrangement, Length, arrangement
from benchmarks.sync_vs_async.figures import ArrangementRun, Results, Setup
from benchmarks.sync_vs_async.files import read, write
from benchmarks.sync_vs_async.mismatch import mismatch_table
from benchmarks.sync_vs_async.options import deployment, parse, setup
from benchmarks.sync_vs_async.report import table
from benchmarks.sync_vs_async.run import Stage
from benchmarks.sync_vs_async.workload import ForcedWorkload, write_checkpoint

WIDTH = 200
"""Columns of output that does not go to a terminal: the table fits."""
LEAVING_S = 45.0
"""Seconds for servers and Ray to end after the deadline; they take 10 s.  Then they are killed."""
WRITING_S = 300.0
"""Seconds to write a checkpoint of random weights: 12 GB take a minute."""

ONE_STEP = Length(steps=0, seconds=0.0)
SHORTER = 32
"""Divisor of the longest answer in the warm-up run: 8,192 tokens take half a minute, 256 a second."""

logger = logging.getLogger("asyncrl.benchmarks.sync_vs_async")


@dataclass(slots=True, kw_only=True)
class Session:
    """One call of this program."""

    asked: argparse.Namespace
    setup: Setup
    about: dict[str, Any]
    console: Console
    started_s: float
    runs: list[ArrangementRun] = field(default_factory=list)
    full_rates: list[float] = field(default_factory=list)

    @property
    def results(self) -> Results:
        """The results so far."""
        return Results(setup=self.setup, runs=tuple(self.runs), full_rates=tuple(self.full_rates))

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        deadline_s: float = self.asked.deadline_s
        return max(0.0, self.started_s + deadline_s - time.monotonic())

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        self.console.print(
            f"{time.monotonic() - self.started_s:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True
        )

    def keep(self, run: ArrangementRun) -> None:
        """Add a finished run and write all results so far."""
        self.runs.append(run)
        write(self.asked.out, self.results, self.about)

    def show(self) -> None:
        """Print all results so far as a table, and write them."""
        write(self.asked.out, self.results, self.about)
        self.console.print(table(self.results))
        self.console.print("\n".join(mismatch_table(self.results)), markup=False, highlight=False, soft_wrap=True)
        self.console.print(f"written to {self.asked.out}/: results.json, table.md, picture.svg", highlight=False)


def main(argv: Sequence[str]) -> int:
    """Measure and show what ``argv`` asks for; returns the exit code."""
    asked, console = parse(argv, __doc__ or ""), Console()
    if not console.is_terminal:
        console.width = WIDTH
    try:
        if asked.show:
            return _show(asked, console)
        need(asked.device)
        asked.out.mkdir(parents=True, exist_ok=True)
        session = Session(
            asked=asked,
            setup=setup(asked),
            about=circumstances("sync_vs_async", argv, asked.commit),
            console=console,
            started_s=time.monotonic(),
        )
        with Signals.caught() as signals, open_logging(asked.out, console):
            return _measured(session, signals)
    except ConfigError as error:
        console.print(f"error: {error}", style="red", highlight=False)
        return 2


def _show(asked: argparse.Namespace, console: Console) -> int:
    results, about = read(asked.show)
    write(asked.out, results, about)
    console.print(table(results))
    return 0


def _measured(session: Session, signals: Signals) -> int:
    """Measure everything, and show the results so far whatever happens; returns the exit code."""
    asked, failed = session.asked, False
    last = threading.Timer(asked.deadline_s + LEAVING_S, _give_up, [session])
    last.daemon = True
    last.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = _checkpoint(session, Path(folder))
            signals.remember()
            num_processes = 2 * session.setup.gpus  # sync-colocate runs two per GPU
            session.say("starting Ray")
            with (
                ray_session(num_processes + 1, hold_signals=signals.hold) as ray,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(_run_in_session(ray, session, checkpoint, signals))
    except ConfigError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # finished measurements are shown all the same
        failed = True
        logger.debug("the benchmark ended", exc_info=error)
        session.say(f"ended by {type(error).__name__}: {error}; {asked.out}/run.log has more")
    last.cancel()
    session.show()
    is_all = len(session.runs) == len(asked.arrangements) * asked.repeats and all(
        run.is_complete for run in session.runs
    )
    return signals.exit_code if signals.received else int(failed or not is_all)


async def _run_in_session(ray: ModuleType, session: Session, checkpoint: Path, signals: Signals) -> None:
    with signals.cancelling(), ExitStack() as stack:
        timeline = TimelineFile(_fresh(session.asked.out), asyncio.get_running_loop().time())
        stack.callback(timeline.close)
        try:
            async with asyncio.timeout(session.left_s) as deadline:
                for colocates in (False, True):
                    chosen = [each for each in session.asked.arrangements if each.colocates == colocates]
                    if chosen:
                        await _all_runs(ray, session, checkpoint, timeline, chosen)
        except TimeoutError:
            if not deadline.expired():  # a timeout of an engine
                raise
            session.say(f"the deadline of {session.asked.deadline_s:g} s has passed; --deadline-s sets it")


async def _all_runs(
    ray: ModuleType, session: Session, checkpoint: Path, timeline: TimelineFile, chosen: Sequence[Arrangement]
) -> None:
    """Measure arrangements that need the same deployment."""
    asked, colocates = session.asked, chosen[0].colocates
    logs = (asked.out / ("logs-colocate" if colocates else "logs")).resolve()
    launch = deployment(asked, checkpoint, logs, session.left_s, colocates=colocates)
    launch.logs.mkdir(exist_ok=True)
    length = Length(steps=asked.steps, seconds=asked.seconds)
    async with deployed(ray, launch, session.say) as running:
        stage = Stage(running, session.setup, load_tokenizer(checkpoint), timeline, session.say)
        freeze_startup_objects()
        with plainly():
            async with asyncio.TaskGroup() as watchers:
                watching = [
                    watchers.create_task(running.watch(), name="servers"),
                    watchers.create_task(watch_loop(stage.loop_lag), name="loop-lag"),
                ]
                session.say("one step of short answers, not counted: kernels are compiled, caches filled")
                await stage.run(
                    arrangement("sync-colocate" if colocates else "sync"), ONE_STEP, _short(session), lambda run: None
                )
                if asked.full_s > 0 and not colocates:
                    await _full_rate(session, stage)
                for repeat, each in product(range(asked.repeats), chosen):
                    session.say(f"{each.name}, repeat {repeat + 1} of {asked.repeats}")
                    await stage.run(each, length, _workload(session, repeat), session.keep)
                for task in watching:
                    task.cancel()
        session.say("stopping")
    running.release_resources()


async def _full_rate(session: Session, stage: Stage) -> None:
    """Measure the rate of full engines.  The runs do not need it, so an error only leaves it out."""
    session.say("engines alone, every slot taken")
    try:
        found = await stage.full_rate(_workload(session, 0), session.asked.full_s)
    except (EngineError, TimeoutError, ValueError) as error:
        session.say(f"engines alone: not measured, {type(error).__name__}: {error}")
    else:
        session.full_rates.append(found)
        session.say(f"engines alone: {found:,.0f} tokens/s")


def _short(session: Session) -> ForcedWorkload:
    """The workload of the first repeat, with short answers."""
    longest = max(1, session.setup.longest // SHORTER)
    return replace(_workload(session, 0), median=min(session.setup.median, longest), longest=longest)


def _workload(session: Session, repeat: int) -> ForcedWorkload:
    setup = session.setup
    return ForcedWorkload(
        vocabulary=SHAPES[setup.model]["vocab_size"],
        prompt_tokens=setup.prompt_tokens,
        median=setup.median,
        longest=setup.longest,
        seed=session.asked.seed + repeat,
    )


def _checkpoint(session: Session, folder: Path) -> Path:
    """The model's folder, written by a new process if needed: this one must hold no GPU.  Raises ConfigError."""
    asked = session.asked
    checkpoint: Path = (asked.checkpoint or folder / "model").resolve()
    if not (checkpoint / "tokenizer_config.json").exists():  # the file that is written last
        session.say(f"writing random weights: {asked.model}")
        writer = multiprocessing.get_context("spawn").Process(
            target=write_checkpoint, args=(checkpoint, asked.model, asked.device)
        )
        writer.start()
        writer.join(min(WRITING_S, session.left_s))
        if writer.exitcode != 0:
            writer.kill()
            raise ConfigError(f"--model {asked.model} --device {asked.device}: no checkpoint, exit {writer.exitcode}")
    check_layout(read_shape(checkpoint), parallel_of(asked), asked.device)
    return checkpoint


def _fresh(out: Path) -> Path:
    """``out`` without the timeline of an earlier call."""
    for part in parts_of(out / TIMELINE_FILE):
        part.unlink(missing_ok=True)
    return out


def _give_up(session: Session) -> None:
    """Show the results so far, kill all processes and exit.  Runs in a thread, in case the end hangs."""
    with suppress(Exception):
        session.say(f"not ended {LEAVING_S:g} s after the deadline: all processes are killed")
        session.show()
    with suppress(Exception):
        end(psutil.Process().children(recursive=True))
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
