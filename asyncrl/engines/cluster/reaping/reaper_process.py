"""The driver's side of the session's reaper, which ends the run's processes if the driver cannot."""

import logging
import os
import select
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from asyncrl.engines.cluster.reaping import reaper
from asyncrl.errors import ServerFailed

logger = logging.getLogger(__name__)

VARIABLE = "ASYNCRL_SESSION"
"""Environment variable that every process started during the session inherits."""
PROGRAM = reaper.__file__
"""The reaper's program, which is in its command line."""
_running: list["Reaper"] = []
"""The reaper of this process's session, if there is one: a signal handler has no other way to it."""
WAIT_S = reaper.LIMIT_S + 3.0
START_S = 60.0
"""Seconds for the reaper to start, which takes it 20 ms where Python is on a local disk."""


class Reaper:
    """The reaper of this process's session.  It outlives the driver by seconds."""

    def __init__(self, mark: str) -> None:
        """Start the reaper.  Raises ServerFailed."""
        command = [sys.executable, "-P", "-S", "-E", PROGRAM, str(os.getpid()), mark]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path("/"),
                start_new_session=True,  # Ctrl-C and a killed process group must not end it
            )
        except OSError as error:
            raise ServerFailed(f"the process that ends leftovers did not start: {error}") from error
        with self._process.stdout as output:  # type: ignore[union-attr]
            if not select.select([output], [], [], START_S)[0]:
                self._process.kill()
                self._process.communicate()
                raise ServerFailed(f"the process that ends leftovers did not start within {START_S:g} s")
            if output.readline() != reaper.READY:
                raise ServerFailed(f"the process that ends leftovers ended with code {self._process.wait()}")

    @property
    def pid(self) -> int:
        """The reaper's process id."""
        return self._process.pid

    def tell(self, parts: Mapping[str, int]) -> None:
        """Name the processes, by what they are, without which Ray ends the driver."""
        for name, pid in parts.items():
            self._write(f"{reaper.PART} {name} {pid}")

    def announce(self) -> None:
        """Say that the program ends at once, with a line about it.  Takes no lock and logs nothing."""
        with suppress(OSError, ValueError):
            os.write(self._process.stdin.fileno(), f"{reaper.AT_ONCE}\n".encode())  # type: ignore[union-attr]

    def finish(self, spared: Collection[int]) -> None:
        """Have the reaper end what is left, without the processes ``spared``, and return once it has."""
        for pid in spared:
            self._write(f"{reaper.SPARE} {pid}")
        self._write(reaper.OVER)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            logger.warning("processes of the run did not end within %g s after SIGKILL", reaper.LIMIT_S)
            self._process.kill()
            self._process.wait()

    def _write(self, line: str) -> None:
        try:
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())  # type: ignore[union-attr]
        except OSError as error:
            logger.warning("the process that ends leftovers is gone: %s", error)


def announce_end_at_once() -> None:
    """Tell the reaper that the program ends at once.  A signal handler may call it."""
    for process in tuple(_running):
        process.announce()


@contextmanager
def reaped(spared: Callable[[], Collection[int]]) -> Iterator[Reaper]:
    """Mark all processes that start in the body, and end all that are left after it; also if this process is killed.

    ``spared`` returns the ids of processes that end by themselves.  Raises ServerFailed.
    """
    value = uuid4().hex
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        process = Reaper(f"{VARIABLE}={value}")
        _running.append(process)
        try:
            yield process
        finally:
            _running.remove(process)
            process.finish(spared())
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
