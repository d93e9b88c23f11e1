"""Server processes that we start: they log to a file, die with their parent, and leave nothing behind."""

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from asyncrl.errors import ServerFailed

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # opened here: between fork and exec, loading a library may deadlock
_KILL_S = 5.0
"""For the kernel to collect killed processes; more than this means one is stuck in a driver."""
_TAIL_BYTES = 65_536
_ENDS_ITSELF = ("sigquit received", "received sigquit", "triggering sigquit")
"""SGLang's log has one of them when a child of it has failed: it then sends SIGKILL to all of its processes."""
_REASONS = (
    re.compile(r"^\S*(Error:?|Exception:|what\(\):)(\s|$)|crashed with exit code -9"),  # -9: nobody else knows of that
    re.compile(r"crashed with exit code"),
    re.compile(r"(^|\s)[\w.]*error:", re.IGNORECASE),
)
"""What says why, the best first: an exception or a child that was killed, another that ended, a mention."""
_MOST_SHOWN = 300
"""Characters of a line of the log."""


class ServerProcess:
    """A running server, in a session of its own, with all the processes it starts.

    The kernel kills the server when the *thread* that made this object ends, so make it in a thread that lives as long
    as the server should.  Safe to use from one thread at a time.
    """

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        """Start it.  ``environment`` is added to ours.  Raises ServerFailed."""
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._log_began = log.tell()
            try:
                self._process = subprocess.Popen(
                    list(arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise ServerFailed(f"{name} did not start: {error}") from error

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the server itself still runs."""
        return self._process.poll() is None

    def raise_if_dead(self) -> None:
        """Raises ServerFailed with the line of the log that says why; of a SIGKILL from elsewhere it does not know."""
        code = self._process.poll()
        if code is not None:
            how = f"ended with code {code}" if code >= 0 else f"was ended by signal {-code}, {signal.strsignal(-code)}"
            log = self._text().lower()
            is_from_elsewhere = code == -signal.SIGKILL and not any(words in log for words in _ENDS_ITSELF)
            why = "" if is_from_elsewhere else f": {self.cause()}"
            raise ServerFailed(f"{self.name} {how}{why} (log: {self.log_path})")

    def stop(self) -> None:
        """Kill the server and everything it started; return when they are gone.  Safe to call twice.

        SIGKILL at once: SGLang's graceful shutdown takes many seconds and there is nothing on the server to lose.
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
        """The last lines that it wrote."""
        return "\n".join(self._text().splitlines()[-num_lines:])

    def cause(self) -> str:
        """The line of the log's end that most likely says what went wrong."""
        lines = [line.strip() for line in self.tail(200).splitlines() if line.strip()]
        told = ([line for line in lines if reason.search(line)] for reason in _REASONS)
        line = next(filter(None, told), lines or ["nothing in the log"])[-1]
        return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]}..."

    def _text(self) -> str:
        """The end of what it wrote; what is before is of a server that was started earlier."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_began, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _family(self) -> list[psutil.Process]:
        """The session's processes.  By session, not by parent: a child whose parent died is not lost."""
        family = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self._process.pid:
                    family.append(process)
            except ProcessLookupError:
                continue
        return family


def _die_with_parent() -> None:
    # Invariant: between fork and exec only this call.  Another thread of the parent may have held any lock, of memory
    # or of an import, and the copy of that lock is never released here.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
