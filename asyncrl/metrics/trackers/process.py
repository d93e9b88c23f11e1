"""The driver's side of a tracker that runs in a separate process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Timer
from typing import Any

import psutil

from asyncrl.errors import AsyncRLError
from asyncrl.metrics.sinks import Row

PROGRAM = "asyncrl.metrics.trackers.program"
KILL_S = 5.0
"""Seconds for a killed process to end."""
ROOT = Path(__file__).parents[3]


class TrackerFailed(AsyncRLError):
    """A tracker raised, died, or did not answer in time.  It does not end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that the calls of a tracker may take."""

    open_s: float = 120.0
    """Includes the import of the library, and the 90 s that W&B waits for its server."""
    log_s: float = 60.0
    finish_s: float = 120.0


class TrackerProcess:
    """A tracker in a child process, which receives one JSON object per line and answers each with one.

    ``backend`` is ``module:Class``; the class is made in the child, with ``options`` as its arguments.  The options
    travel through the pipe, so no secret among them is in a command line or an environment.  The child's other output
    goes to the file ``log``.
    """

    def __init__(self, backend: str, options: Mapping[str, Any], log: Path, deadlines: Deadlines | None = None) -> None:
        self._hello = {"backend": backend, "options": dict(options)}
        self._log = log
        self._deadlines = deadlines or Deadlines()
        # Invariant: one thread calls ``open``, ``log`` and ``finish``; ``abandon`` and ``pid`` are called from any
        # thread.  The lock guards the reference, not the pipes: ``abandon`` kills the child, whereupon a read or write
        # in progress fails.
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the child; None while there is none."""
        with self._lock:
            return None if self._child is None else self._child.pid

    def open(self) -> str:
        """Start the child and open the tracker in it.  Raises TrackerFailed."""
        self.abandon()
        self._start()
        return str(self._ask(self._hello, self._deadlines.open_s, "start"))

    def log(self, row: Row, /) -> None:
        """Send one row.  Raises TrackerFailed."""
        self._ask({"row": dict(row)}, self._deadlines.log_s, "log")

    def finish(self) -> None:
        """Finish the tracker and wait for the child's end.  Raises TrackerFailed."""
        self._ask({"finish": True}, self._deadlines.finish_s, "finish")
        self.abandon()

    def abandon(self) -> None:
        """Kill the child with its descendants."""
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return
        # Its death ends a call in progress, so it is the last to die: by then its descendants are gone.  It is stopped
        # first, because it would start another process after its descendants were listed.
        child.send_signal(signal.SIGSTOP)
        descendants = _tree(child.pid)
        for process in descendants:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(descendants, timeout=KILL_S)
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(KILL_S)
        # Another thread may be in a call of these pipes.  The child is dead, so that call returns, and then these do.
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes

    def _start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
        with self._log.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C must not reach it: it still has rows to send
            )
        with self._lock:
            self._child = child

    def _ask(self, message: Mapping[str, Any], within_s: float, call: str) -> Any:
        """Send one message and return the answer.  The child is killed if the answer is late."""
        with self._lock:
            child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise TrackerFailed(f"{call}: the tracker was abandoned")
        is_late = Event()
        timer = Timer(within_s, self._end_late, (is_late,))
        timer.daemon = True
        timer.start()
        line = b""
        try:
            child.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except (OSError, ValueError):
            pass  # the child is gone, and the line is empty
        finally:
            timer.cancel()
        if not line:
            why = f"no answer within {within_s:g} s" if is_late.is_set() else "its process ended"
            raise TrackerFailed(f"{call}: {why}; its output is in {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise TrackerFailed(f"{call}: {answer['error']}; its output is in {self._log}")
        return answer["done"]

    def _end_late(self, is_late: Event) -> None:
        is_late.set()
        self.abandon()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _tree(pid: int) -> list[psutil.Process]:
    """Return the descendants of ``pid``: W&B's service has its own session, so a process group does not reach it."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
