"""Start the real program as a person would, and look for anything it leaves behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from asyncrl.config import Program

ROOT = Path(__file__).parents[2]
MARK = "ASYNCRL_TEST_RUN"
"""Environment variable that every process of a run inherits."""
QUICKSTART = ("--config", "configs/quickstart.toml")
QUICKSTART_STEPS = 60
"""The number of steps in the file of the quickstart."""
FATES = ("trained", "masked", "filtered", "stale", "failed", "held")
"""Names of what becomes of generated tokens."""
START_S = 900.0
"""Limit for the first steps of a run on a busy machine."""
RUN_S = 1200.0
"""Limit for a run of a few steps on a busy machine."""
LEAVING_S = 10.0
"""Time that Ray's reaper needs when the program ended in the millisecond in which Ray removes its signal handlers."""
NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Workers of the tests, which share the processors of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The exit code, output and leftovers of a run."""

    code: int
    """The exit code as a shell has it: 128 and more when a signal's default action ended the program."""
    output: str
    run_dir: Path
    left: tuple[str, ...]
    """Command lines of processes that outlived the run by more than a moment."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return [orjson.loads(line) for line in (self.run_dir / "metrics.jsonl").read_bytes().splitlines()]


class Launched:
    """A run in the background."""

    def __init__(self, run_dir: Path, arguments: Sequence[str], program: Program = "train_async.py") -> None:
        self.run_dir = run_dir
        self._mark = uuid.uuid4().hex
        self._output = run_dir.with_suffix(".output")
        command = [sys.executable, program, "--run-dir", str(run_dir), "--progress", "lines", *arguments]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, MARK: self._mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the program itself."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program itself."""
        self._process.send_signal(number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the program and to all that share its terminal, as Ctrl-C does."""
        os.killpg(self._process.pid, number)

    def wait_for_output(self, text: str, timeout_s: float) -> None:
        """Return once ``text`` is in the program's output."""
        self.wait_until(lambda: text in self._output.read_text(), repr(text), timeout_s)

    @contextmanager
    def killed_by_a_failure(self) -> Iterator[None]:
        """Kill the run if the block raises, because it would take the machine from all tests that follow."""
        try:
            yield
        except BaseException:
            for process in self.members():
                process.kill()
            self._process.wait()
            raise

    def page(self) -> str:
        """Return the address of the run's page (--page-port)."""
        (line,) = [line for line in self._output.read_text().splitlines() if line.startswith("page: ")]
        return line.removeprefix("page: ")

    def wait_for_steps(self, count: int, timeout_s: float) -> None:
        """Return once ``count`` steps are in metrics.jsonl."""
        metrics = self.run_dir / "metrics.jsonl"
        self.wait_until(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= count, f"{count} steps", timeout_s
        )

    def wait_until(self, is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Return once ``is_so``.  Raises AssertionError, and kills the run, if it ends first or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if self._process.poll() is not None or time.monotonic() >= deadline:
                for process in self.members():  # or it takes the machine from all tests that follow
                    process.kill()
                self._process.wait()
                raise AssertionError(f"not {what} within {timeout_s:g} s:\n{self._output.read_text()}")
            time.sleep(0.05)

    def members(self) -> list[psutil.Process]:
        """Every process of this run."""
        return members_of(self._mark)

    def processes(self) -> list[psutil.Process]:
        """Every process of this run, and those below it whose title has replaced their environment."""
        return list({*self.members(), *psutil.Process(self.pid).children(recursive=True)})

    def end_in_time(self, code: int) -> Outcome:
        """Assert that the run, which just got a signal, ends with ``code`` and leaves nothing, in 25 s if alone."""
        began = time.monotonic()
        outcome = self.finish(60.0)
        assert outcome.code == code, outcome.output
        assert outcome.left == ()
        assert time.monotonic() - began < 25.0 * NUM_WORKERS
        assert "Traceback" not in outcome.output
        return outcome

    def finish(self, timeout_s: float) -> Outcome:
        """Wait for the program to end by itself; record its leftovers, then kill them."""
        try:
            self._process.wait(timeout=timeout_s)
        finally:
            _, left = psutil.wait_procs(self.members(), timeout=LEAVING_S)
            names = tuple(" ".join(_command(process))[:120] for process in left)
            for process in left:
                process.kill()
            self._process.wait()
        output, code = self._output.read_text(), self._process.returncode
        return Outcome(code=code if code >= 0 else 128 - code, output=output, run_dir=self.run_dir, left=names)


def run(run_dir: Path, *arguments: str, timeout_s: float = RUN_S, program: Program = "train_async.py") -> Outcome:
    """Start the program and wait for its end."""
    return Launched(run_dir, arguments, program).finish(timeout_s)


def members_of(mark: str) -> list[psutil.Process]:
    """Every process that inherited ``mark``."""
    return [process for process in psutil.process_iter() if _environment(process).get(MARK) == mark]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return [f"process {process.pid}"]
