"""The page of a run that is running: a child process, so that nothing it does can slow the run down.

The parent binds the port, so a taken one is an error before anything else starts.  The key travels on the child's
standard input, whose end also ends the child: it never outlives the run.
"""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import NotNow
from asyncrl.page.address import LOOPBACK, url_of

NICENESS = 10
"""The run comes first."""
_END_S = 3.0
_LOG_FILE = "page.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPage:
    """The page of this run."""

    url: str
    """The address with the page's key."""
    pid: int


@contextmanager
def page_of(run_dir: Path, port: int, logs: Path) -> Iterator[RunningPage]:
    """Show ``run_dir`` on ``port`` of this machine, or on a free one if it is 0.  Raises NotNow if it is taken."""
    try:
        listener = socket.create_server((LOOPBACK, port))
    except OSError as error:
        raise NotNow(f"--page-port {port}: {error.strerror}; choose another port, or 0 for a free one") from error
    key = secrets.token_urlsafe(24)
    with listener:
        url = url_of(listener.getsockname()[1], key)
        child = _start(run_dir, listener, logs)
    try:
        _send(child, key)
        yield RunningPage(url=url, pid=child.pid)
    finally:
        _end(child)


def _start(run_dir: Path, listener: socket.socket, logs: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "asyncrl.page", os.fspath(run_dir), "--listener", str(listener.fileno())]
    with suppress(OSError):
        logs.mkdir(exist_ok=True)
    with _log(logs / _LOG_FILE) as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C ends the run first, then the page
        )


@contextmanager
def _log(path: Path) -> Iterator[int]:
    """Open a file for the page's output; without a disk, it goes nowhere."""
    try:
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)
    try:
        yield output
    finally:
        os.close(output)


def _send(child: subprocess.Popen[bytes], key: str) -> None:
    """Give the child its key and keep the pipe open.  A child that is gone has said why in its log."""
    assert child.stdin is not None
    with suppress(OSError):
        child.stdin.write(f"{key}\n".encode())
        child.stdin.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with suppress(OSError):
        child.stdin.close()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
