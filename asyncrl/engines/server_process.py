"""Server processes that log to a file, die with their parent, and leave no child process behind."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from asyncrl.engines.log_limit import shorten_log
from asyncrl.errors import ServerFailed

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # opened here: between fork and exec, loading a library may deadlock
_KILL_S = 5.0
"""Seconds for the kernel to remove killed processes.  A process that takes longer is stuck in a driver."""
_TAIL_BYTES = 65_536
"""Bytes at the end of the log that are searched for the cause of a failure."""
_ENDS_ITSELF = ("sigquit received", "received sigquit", "triggering sigquit")
"""Texts of SGLang's log, one of which appears when a child has failed.

SGLang then sends SIGKILL to all of its processes.
"""
_REASONS = (
    re.compile(r"^\S*(Error:?|Exception:|what\(\):)(\s|$)|crashed with exit code -9"),  # -9: logged nowhere else
    re.compile(r"crashed with exit code"),
    re.compile(r"(^|\s)[\w.]*error:", re.IGNORECASE),
)
"""Patterns of lines that name a cause, best first: an exception or a killed child, a child that ended, "error:"."""
_MOST_SHOWN = 300
"""Characters of a log line that an error message quotes at most."""


class ServerProcess:
    """A running server, in a new session, with all the processes that it starts.

    The kernel kills the server when the *thread* that created this object ends, so create it in a thread that lives as
    long as the server should.  Use it from one thread at a time.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        key: str | None = None,
    ) -> None:
        """Start the server.  ``environment`` is added to this process's, and ``key`` is its standard input.

        Raises ServerFailed.
        """
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_began = log.tell()
            try:
                self._process = subprocess.Popen(
                    list(arguments),
                    stdin=subprocess.DEVNULL if key is None else subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise ServerFailed(f"{name} did not start: {error}") from error
        if key is not None:
            _write(self._process, key)

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the server itself still runs."""
        return self._process.poll() is None

    def raise_if_dead(self) -> None:
        """Raise ServerFailed, with the cause from the log, if the server has ended.

        The error has no cause for a SIGKILL from elsewhere, which leaves nothing in the log.  Also keeps the log of a
        running server below a size: see ``log_limit``.
        """
        code = self._process.poll()
        if code is None and shorten_log(self.log_path):
            self._log_began = 0
        if code is not None:
            how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
            log = self._text().lower()
            is_from_elsewhere = code == -signal.SIGKILL and not any(words in log for words in _ENDS_ITSELF)
            why = "" if is_from_elsewhere else f": {self.cause()}"
            raise ServerFailed(f"{self.name} {how}{why} (log: {self.log_path})")

    def stop(self) -> None:
        """Kill the server and all processes it started; return when they are gone.  Safe to call twice.

        Sends SIGKILL at once: SGLang's graceful shutdown takes many seconds, and the server has nothing to save.
        """
        family = self._family()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=_KILL_S)
        self._process.poll()

    def tail(self, num_lines: int = 20) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self._text().splitlines()[-num_lines:])

    def cause(self) -> str:
        """Return the line near the end of the log that most likely names the cause."""
        lines = [line.strip() for line in self.tail(200).splitlines() if line.strip()]
        told = ([line for line in lines if reason.search(line)] for reason in _REASONS)
        line = next(filter(None, told), lines or ["nothing in the log"])[-1]
        return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."

    def _text(self) -> str:
        """Return the end of this server's log; the file may begin with the log of an earlier start."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_began, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _family(self) -> list[psutil.Process]:
        """Return the session's processes.

        They are found by session and not by parent, so that a child whose parent died is included.
        """
        family = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self._process.pid:
                    family.append(process)
            except ProcessLookupError:
                continue
        return family


def _write(process: "subprocess.Popen[bytes]", key: str) -> None:
    """Write a line to the process's standard input and close it; the line fits into the pipe's buffer."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended, and its log says why
        process.stdin.write(f"{key}\n".encode())
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def _die_with_parent() -> None:
    # Invariant: this call is the only one between fork and exec.  Another thread of the parent may have held any lock
    # (malloc's, the import lock), and the child's copy of that lock is never released.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
