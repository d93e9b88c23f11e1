"""A study in progress, as the page sees it.

page ──starts──▶ process ──lines──▶ daemon thread ──▶ words of progress; at the end ``RUN_DIR/page/advice.json``

waits for     nothing; the thread waits for the process, at most for the deadline
on failure    the sentence is kept in memory and shown; the advice before stays
on exit       the process notices that its stdin closed, and ends with its workers
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any

import orjson

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.page.advising.advice import Advice
from asyncrl.rollout_log.whole_file import write_whole

ADVICE_FILE = "advice.json"
PAGE_FOLDER = "page"
DEADLINE_S = 600.0
"""Limit for a study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a study."""

    is_running: bool = False
    text: str = ""
    """The progress in words, or the problem of the last study."""


@dataclass(slots=True)
class Job:
    """The studies of one run, one at a time.  Any thread may call any method."""

    run_dir: Path
    deadline_s: float = DEADLINE_S
    advice: Advice | None = None
    """The newest advice; also in the file, unless that cannot be written."""
    answered: float = 0.0
    """When the last study was started or ended, in seconds since 1970."""
    _progress: Progress = field(default_factory=Progress)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.advice = _read(self.run_dir / PAGE_FOLDER / ADVICE_FILE)
        self.answered = self.advice.computed if self.advice else 0.0

    @property
    def progress(self) -> Progress:
        """The state of the study."""
        return self._progress

    def start(self, timeline: Path, settings: Mapping[str, Any], num_steps: int) -> None:
        """Start a study in a process, unless one is running.  ``num_steps`` is kept with its result."""
        with self._lock:
            if self._progress.is_running:
                return
            self._progress = Progress(is_running=True, text="Starting the simulator.")
            self.answered = time.time()
        request = orjson.dumps({"timeline": str(timeline.absolute()), "settings": settings}, default=str)
        in_daemon_thread(lambda: self._follow(request, num_steps), "advice")

    def _follow(self, request: bytes, num_steps: int) -> None:
        """Start the process and read its lines until it ends."""
        ended = Progress(text="The simulator ended without an answer.")
        try:
            with _started() as process:
                is_late = Event()
                timer = Timer(self.deadline_s, _kill, (process, is_late))
                timer.daemon = True
                timer.start()
                try:
                    ended = self._read_lines(process, request, num_steps, is_late)
                finally:
                    timer.cancel()  # before the process is reaped: its id is not another one's yet
        except OSError as error:
            ended = Progress(text=f"The simulator cannot be run: {error}")
        finally:
            self.answered = time.time()
            self._progress = ended

    def _read_lines(self, process: subprocess.Popen[bytes], request: bytes, num_steps: int, is_late: Event) -> Progress:
        """Return the state at the end of the process."""
        assert process.stdin is not None  # a pipe
        assert process.stdout is not None  # a pipe
        with suppress(BrokenPipeError):  # it was killed already, and there is nothing to read
            os.write(process.stdin.fileno(), request + b"\n")  # unbuffered: closing must not write it again
        for line in process.stdout:
            message = orjson.loads(line)
            if "advice" in message:
                self._keep(replace(Advice.of(message["advice"]), num_steps=num_steps))
                return Progress()
            if "problem" in message:
                return Progress(text=f"There is no advice: {message['problem'].rstrip('.')}.")
            self._progress = Progress(is_running=True, text=message["progress"])
        if is_late.is_set():
            return Progress(text=f"There is no advice: the simulator did not end within {self.deadline_s:.0f} s.")
        return Progress(text="There is no advice: the simulator's process was killed.")

    def _keep(self, advice: Advice) -> None:
        self.advice = advice
        with suppress(OSError):  # a folder that may only be read: the advice stays in memory
            path = self.run_dir / PAGE_FOLDER / ADVICE_FILE
            write_whole(path, lambda partial: _write(partial, advice))


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asyncrl.page.advising"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _kill(process: subprocess.Popen[bytes], is_late: Event) -> None:
    is_late.set()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _write(path: Path, advice: Advice) -> None:
    path.write_bytes(orjson.dumps(advice, option=orjson.OPT_INDENT_2))


def _read(path: Path) -> Advice | None:
    try:
        return Advice.of(orjson.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # of another version of asyncrl, or damaged: the button makes a new one
