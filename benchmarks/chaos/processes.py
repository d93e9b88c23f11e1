"""The processes of a life, recognized by a variable in their environment, also after their parents are gone."""

import os
import time
from collections.abc import Collection

import psutil

MARK = "ASYNCRL_CHAOS_LIFE"
"""Environment variable that every process of a life inherits; its value names the life and the run."""


class Family:
    """The processes whose environment has ``MARK=value``, and all that were once seen below a given process."""

    def __init__(self, value: str) -> None:
        self.value = value
        self._seen: set[psutil.Process] = set()

    def look(self, root: psutil.Process | None = None) -> None:
        """Remember the processes that run now; a process may later lose its environment or its parent."""
        self._seen.update(each for each in psutil.process_iter() if self._is_marked(each))
        if root is not None:
            try:
                self._seen.update(root.children(recursive=True))
            except psutil.NoSuchProcess:
                return

    def alive(self) -> list[psutil.Process]:
        """Return the processes that run now."""
        self.look()
        return [each for each in self._seen if is_running(each)]

    def find(self, text: str) -> list[psutil.Process]:
        """Return the processes whose command lines contain ``text``, oldest first."""
        found = [each for each in self.alive() if text in command(each)]
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    def wait(self, timeout_s: float) -> tuple[float, tuple[str, ...]]:
        """Wait until no process is left; return the seconds, and the command lines of those left."""
        began = time.monotonic()
        while (left := self.alive()) and time.monotonic() - began < timeout_s:
            time.sleep(0.2)
        return time.monotonic() - began, tuple(sorted(command(each)[:60].strip() for each in left))

    def kill(self) -> None:
        """Kill the processes that run now, and wait for their end."""
        for _ in range(3):  # a process may start another one meanwhile
            left = self.alive()
            for process in left:
                _kill(process)
            psutil.wait_procs(left, timeout=5.0)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.value
        except psutil.Error:
            return False


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def command(process: psutil.Process) -> str:
    """Return the command line; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def free_port(taken: Collection[int] = ()) -> int:
    """Return a TCP port of the loopback interface that no process listens on."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    return port if port not in taken else free_port(taken)


def _kill(process: psutil.Process) -> None:
    if process.pid == os.getpid():
        raise AssertionError("a life never contains the benchmark itself")
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
