"""The entry point: command line in, exit code out.

0    trained to the end                      130  interrupted (Ctrl-C)
1    failed, with one line naming the cause   143  terminated (SIGTERM), after a checkpoint if there was time
2    the configuration is wrong; nothing was started, and a second start would not help

A dry run ends with 0 or 2.
"""

import asyncio
import logging
import os
import platform
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Protocol

import orjson
import uvloop
from rich.console import Console, RenderableType
from rich.text import Text

from asyncrl.alarms.alarm_log import AlarmLog
from asyncrl.app.assembly import LOGS_FOLDER, MODEL_FOLDER, VERSIONS_FILE, deployment_of, run_training
from asyncrl.app.checks import Checked, check
from asyncrl.app.debugging.train_only import train_on_files
from asyncrl.app.dry_run import dry_run
from asyncrl.app.ending.leaving import EndTimer
from asyncrl.app.ending.standstill import standstill_watch
from asyncrl.app.signals import Signals
from asyncrl.app.trackers import Trackers, open_trackers
from asyncrl.capacity.machine import raise_open_files
from asyncrl.config import Program, RunConfig, load_run, resolved
from asyncrl.config.derived import run_dir as place_of
from asyncrl.daemon_threads import DaemonThreads
from asyncrl.engines.cluster.deployment import deployed_trainer, pick_device
from asyncrl.engines.cluster.session import ray_session
from asyncrl.engines.megatron.checkpoint.directory import latest
from asyncrl.engines.megatron.checkpoint.held import SaveLease, held
from asyncrl.errors import AsyncRLError, ConfigError, NotNow, unusable
from asyncrl.metrics.closing import closing_table
from asyncrl.metrics.facts import GroupCounts, StepFacts, TokenCounts
from asyncrl.metrics.history import History
from asyncrl.metrics.live_view import RunTargets, SafeView, View, open_view
from asyncrl.metrics.logs import LOG_FILE, open_logging
from asyncrl.metrics.reporter import Reporter
from asyncrl.metrics.sinks import METRICS_FILE, JsonlSink, Sink, TensorBoardSink
from asyncrl.metrics.timeline import NoTimeline, Timeline, TimelineFile
from asyncrl.page.child import page_of
from asyncrl.page.runs.run_status import StatusFile
from asyncrl.pipeline.early_end import EarlyEnd
from asyncrl.pipeline.recovery import last_epoch
from asyncrl.plain_text import indented, one_line
from asyncrl.rollout_log.files import RolloutFiles

logger = logging.getLogger(__name__)

PACKAGES = ("megatron-core", "numpy", "ray", "sglang", "sglang-router", "torch", "transformers")
"""Packages whose versions are recorded, because they determine a run's results."""
USER_THREADS = 64
"""Threads for ``asyncio.to_thread`` in user code on the driver's event loop.  No call of ours uses them."""
PRIVATE = 0o700
"""The mode of a run directory, which has prompts, answers, settings and logs."""
_OTHERS = 0o077


class Listener(Sink, Protocol):
    """The program that started this one, if it follows the run: a destination of rows that hears of the rest as well.

    No method blocks.
    """

    def begin(self, run_dir: Path) -> None:
        """Hear of the run directory, before the first row."""

    def fail(self, name: str, text: str) -> None:
        """Hear of the error that ended the run; ``name`` is its class."""


def main(argv: Sequence[str], *, program: Program = "train_async.py", listener: Listener | None = None) -> int:
    """Run what ``argv`` (without the program's name) describes and return the exit code.

    ``train.py`` is the same program with ``--max-staleness 0``.
    """
    with Signals.caught() as signals, ExitStack() as logs:
        log: Path | None = None
        status: StatusFile | None = None
        try:
            run, console = load_run(argv, program=program), Console()
            if run.output.dry_run:
                dry_run(run, console)
                return 0
            raise_open_files()
            lease = logs.enter_context(
                held(run.checkpoint, lambda line: console.print(Text(line), soft_wrap=True), last_epoch)
            )
            checked = check(run)
            run_dir, warning = _open_run_dir(checked.run)
            logs.enter_context(open_logging(run_dir, console))
            if warning is not None:
                logger.warning("%s", warning)
            log = run_dir / LOG_FILE
            status = StatusFile(run_dir)
            _run(checked, run_dir, console, signals, lease, listener)
        except BaseException as error:  # noqa: BLE001 (the one place where every exception ends)
            code = _exit_code(error, signals, log, listener)
            if status is not None:
                status.end(code, _problem(error) if code else "")
            return code
        code = signals.exit_code if signals.received else 0
        status.end(code, "")
        return code


def _exit_code(error: BaseException, signals: Signals, log: Path | None, listener: Listener | None) -> int:
    """Print the error that ended the run, tell it to the listener, and return the exit code.

    A received signal takes precedence over the errors that it caused.  The traceback is in the file ``log``.
    """
    if log is not None:
        logger.debug("the run ended", exc_info=error)
    if signals.received:
        return signals.exit_code
    if isinstance(error, SystemExit):  # of --help
        return int(error.code or 0)
    is_named = isinstance(error, AsyncRLError)
    text = _problem(error)
    if not is_named:
        text = f"{text} (a bug in asyncrl{f'; the traceback is in {log}' if log else ''})"
        if log is None:
            _print_traceback(error)
    if listener is not None:
        listener.fail(type(error).__name__, str(error) if is_named else text)
    _say(text)
    return 2 if isinstance(error, ConfigError) else 1


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, ConfigError | NotNow) else f"{type(error).__name__}: {error}"


def _run(
    checked: Checked,
    run_dir: Path,
    console: Console,
    signals: Signals,
    lease: SaveLease | None,
    listener: Listener | None,
) -> None:
    run, started = checked.run, time.monotonic()
    ending = EndTimer(signals.code_if_received)
    is_bounded = not run.debug.debug_rollout_only and run.debug.load_debug_rollout_data is None
    bound = run.rollout.staleness if is_bounded else None
    plan = RunTargets(name=run.name, num_steps=run.rollout.num_rollout, max_staleness=bound)
    signals.remember()
    with ExitStack() as stack:
        stack.callback(ending.cancel)
        view = SafeView(lambda: open_view(run.output.progress, console, plan))
        stack.callback(view.close)
        view.note(f"run directory: {run_dir}")
        page = _open_page(stack, run, run_dir, view)
        _tell(checked, plan, run_dir, view)
        history, before = History(steps_before=checked.start.step), checked.start.before
        # Otherwise a scheduler would start the run again, which then ends with 2: all its steps are done.
        signals.cost_nothing_once(
            lambda: ending.has_ended_well and history.steps_before + history.steps >= plan.num_steps
        )
        trackers = open_trackers(run, run_dir, run_dir / LOGS_FOLDER)
        reporter = Reporter(_sinks(run, run_dir, history, trackers, listener), before.tokens if before else None)
        stack.callback(reporter.close)
        rollouts = _rollout_files(run, run_dir)
        if rollouts is not None:
            stack.callback(rollouts.close)
        stack.callback(checked.user_code.close)  # if the run never begins
        view.phase("starting Ray")
        try:
            with (
                ray_session(
                    checked.num_processes + 1, hold_signals=signals.hold, spared=lambda: trackers.pids() | page
                ) as ray,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(_run_in_session(ray, checked, run_dir, view, reporter, rollouts, signals, ending, lease))
        finally:
            view.close()
            done = history.steps_before + history.steps
            is_interrupted = signals.received is not None and done < plan.num_steps
            if signals.received is not None and is_interrupted:
                _show(console, Text(one_line(_interruption(run, done, signals.received.name))))
        if is_interrupted:
            return
        _show(console, closing_table(history, plan, time.monotonic() - started, run_dir))
        for place in trackers.places():
            _show(console, Text(one_line(place)))


def _open_page(stack: ExitStack, run: RunConfig, run_dir: Path, view: View) -> set[int]:
    """Start the page if the run wants one, and return the ids of its processes.  Raises NotNow."""
    if run.output.page_port is None:
        return set()
    page = stack.enter_context(page_of(run_dir, run.output.page_port, run_dir / LOGS_FOLDER))
    view.note(f"page: {page.url}")
    return {page.pid}


def _show(console: Console, what: RenderableType) -> None:
    """Print something at the end of a run, unless the terminal is gone or the disk of a redirected output full."""
    try:
        console.print(what, soft_wrap=isinstance(what, Text))
    except OSError as error:
        logger.warning("the end of the run is not shown: %s", error)


def _tell(checked: Checked, plan: RunTargets, run_dir: Path, view: View) -> None:
    """Show the notes of the configuration, where the run starts, and the settings that changed since the checkpoint."""
    for line in checked.run.notes:
        view.note(f"note: {line}")
        logger.info(line)
    view.note(_beginning(checked, plan, has_rows=(run_dir / METRICS_FILE).exists()))
    for line in checked.start.changes:
        view.note(line)
        logger.info(line)


def _beginning(checked: Checked, plan: RunTargets, *, has_rows: bool) -> str:
    """Describe where the run starts: a checkpoint, a folder of weights, or ``--hf-checkpoint``."""
    before, origin, asked = checked.start.before, checked.start.origin, checked.run.checkpoint.load
    if before is not None and origin is not None:
        return f"resuming from {origin.folder}: {before.step} of {plan.num_steps} steps are done"
    start = f"starting from {checked.run.model.hf_checkpoint if origin is None else origin.folder}"
    if asked is None:
        return start
    again = f"; {METRICS_FILE} already has rows: if a step appears twice, the later row is valid" if has_rows else ""
    return f"no checkpoint in {asked}: {start}{again}"


def _interruption(run: RunConfig, done: int, signal: str) -> str:
    """Describe how many steps were done and how to resume the run."""
    said = f"{signal}: ended after {done} of {run.rollout.num_rollout} steps"
    folder = run.checkpoint.save
    newest = None if folder is None else latest(folder)
    if newest is None:
        return f"{said}; there is no checkpoint of it"
    lost = done - int(newest.name.rpartition("_")[2]) if newest.name.startswith("iter_") else 0
    without = f", without the last {'step' if lost == 1 else f'{lost} steps'}" if lost > 0 else ""
    again = "" if run.checkpoint.load == folder else f" with --load {folder}"
    return f"{said}; the newest checkpoint is {newest}{without}; to resume, repeat the command{again}"


async def _run_in_session(
    ray: ModuleType,
    checked: Checked,
    run_dir: Path,
    view: View,
    reporter: Reporter,
    rollouts: RolloutFiles | None,
    signals: Signals,
    ending: EndTimer,
    lease: SaveLease | None,
) -> None:
    trains_on_files = checked.run.debug.load_debug_rollout_data is not None
    logs = None if trains_on_files else checked.hooks.log_hooks()
    asyncio.get_running_loop().set_default_executor(DaemonThreads(USER_THREADS, "user"))

    def report(facts: StepFacts) -> None:
        if rollouts is not None:
            rollouts.write(facts.batch, facts.report)
        numbers = reporter.row(facts)
        if logs is None:
            view.step(reporter.write(numbers), facts)
        else:
            logs.step(facts.batch, facts.evaluation, numbers, lambda row: view.step(reporter.write(row), facts))

    early_end, grace_s = EarlyEnd(), checked.run.failures.grace_s
    with ExitStack() as stack:
        stack.enter_context(ending)
        stack.enter_context(standstill_watch(checked.run.failures.watchdog_timeout_s, signals.code_if_received))
        stack.enter_context(signals.cancelling(lambda: early_end.ask("SIGTERM", grace_s), grace_s))
        timeline = stack.enter_context(_timeline(checked.run, run_dir))
        if logs is not None:
            stack.callback(logs.flush)  # a run that ends early writes every row
        if trains_on_files:
            await _train_on_files(ray, checked, run_dir, view.phase, report, ending)
            return
        await run_training(
            ray,
            checked,
            run_dir=run_dir,
            timeline=timeline,
            phase=view.phase,
            report=report,
            gauges=view.gauges,
            logs=logs,
            ending=ending,
            lease=lease,
            early_end=early_end,
        )


async def _train_on_files(
    ray: ModuleType,
    checked: Checked,
    run_dir: Path,
    phase: Callable[[str], None],
    report: Callable[[StepFacts], None],
    ending: EndTimer,
) -> None:
    run = checked.run
    deployment = deployment_of(checked, pick_device(ray, run.cluster.device), run_dir)
    before, steps = checked.start.before, range(checked.start.step, run.rollout.num_rollout)
    await train_on_files(
        deployed_trainer(ray, deployment, phase),
        steps,
        run.debug.file_to_load,
        (before.tokens, before.groups) if before else (TokenCounts(), GroupCounts()),
        num_updates=deployment.trainer.num_steps_per_rollout,
        save_to=run_dir / MODEL_FOLDER,
        phase=phase,
        report=report,
        ending=ending,
    )


@contextmanager
def _timeline(run: RunConfig, run_dir: Path) -> Iterator[Timeline]:
    origin = asyncio.get_running_loop().time()
    timeline: Timeline = TimelineFile(run_dir, origin) if run.output.timeline else NoTimeline()
    try:
        yield timeline
    finally:
        timeline.close()


def _sinks(
    run: RunConfig, run_dir: Path, history: History, trackers: Trackers, listener: Listener | None
) -> list[Sink]:
    """Return the destinations of rows, and tell the listener where the files are."""
    sinks: list[Sink] = [JsonlSink(run_dir), history, AlarmLog(update_interval=run.rollout.update_weights_interval)]
    if run.output.use_tensorboard:
        sinks.append(TensorBoardSink(run_dir))
    sinks += trackers.sinks
    if listener is not None:
        listener.begin(run_dir)
        sinks.append(listener)
    return sinks


def _rollout_files(run: RunConfig, run_dir: Path) -> RolloutFiles | None:
    share = run.output.rollout_log_share
    return RolloutFiles(run_dir, share) if share > 0 else None


def _open_run_dir(run: RunConfig) -> tuple[Path, str | None]:
    """Create the run directory with the resolved configuration and the package versions; return it and a warning.

    Raises ConfigError or NotNow.
    """
    run_dir = place_of(run, datetime.now())
    try:
        warning = make_private(run_dir)
        _write_settings(run_dir / f"{run.name}.toml", resolved(run))
        (run_dir / VERSIONS_FILE).write_bytes(orjson.dumps(_versions(), option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise unusable(f"--run-dir {run_dir}: {error.strerror}", error) from error
    return run_dir, warning


def make_private(folder: Path) -> str | None:
    """Make ``folder``, or close an existing one of this user to other users, whatever the umask.

    A folder that is meant for all users, as /tmp is, and one of another user stay as they are, with the warning that is
    returned.  Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        return f"--run-dir {folder} belongs to another user, who can read and change the files of this run"
    if found.st_mode & stat.S_ISVTX:
        return f"--run-dir {folder} is open to all users, who can read the files of this run"
    if found.st_mode & _OTHERS:
        folder.chmod(PRIVATE)
    return None


def _write_settings(path: Path, text: str) -> None:
    """Write the file of settings; one with other settings, of a run that this one resumes, gets a number: NAME.1.toml.

    Raises OSError.
    """
    if path.exists() and path.read_text(encoding="utf-8") != text:
        taken = (path.with_suffix(f".{number}.toml") for number in count(1))
        path.rename(next(each for each in taken if not each.exists()))
    path.write_text(text, encoding="utf-8")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "commit": _commit()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _commit() -> str | None:
    """Return the commit of the Git checkout that asyncrl runs from; None if it is not one."""
    command = ("git", "-C", os.fspath(Path(__file__).parent), "describe", "--always", "--dirty")
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return None


def _say(text: str) -> None:
    """Print one line per problem to the standard error, without wrapping or highlighting."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    with suppress(OSError):  # the exit code tells it as well
        for line in text.splitlines():
            errors.print(Text.assemble(("error: ", "bold red"), one_line(line)))


def _print_traceback(error: BaseException) -> None:
    with suppress(OSError):
        sys.stderr.write(indented("".join(traceback.format_exception(error))) + "\n")
