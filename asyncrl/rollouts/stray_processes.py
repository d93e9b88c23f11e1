"""Processes that the agents of a run leave behind, in whatever session or group they are."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Set
from concurrent.futures import Future
from pathlib import Path
from threading import Lock

import psutil

from asyncrl.daemon_threads import in_daemon_thread


class StrayScans:
    """Kills what agents leave, in scans of all processes of the machine.

    A scan takes some 80 us per process, which the event loop lacks.  All agents that end during a scan share the next
    one, because a process of theirs may have escaped the one that runs.
    """

    # Invariant: the mutex guards both fields.  At most one thread scans, and it ends only while nothing waits.  It
    # completes every future, whatever happens to the tasks that wait: strays die even if the end was cancelled.

    def __init__(self, scan: Callable[[Set[int], Set[bytes]], None] | None = None) -> None:
        self._scan = scan or _kill_all_of
        self._mutex = Lock()
        self._waiting: list[tuple[int, bytes, Future[None]]] = []
        self._is_running = False

    async def kill(self, session: int, mark: bytes) -> None:
        """Kill the processes of the session, and all others that have ``mark`` as a variable of their environment."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # from now on the future cannot be cancelled
        with self._mutex:
            self._waiting.append((session, mark, done))
            is_first, self._is_running = not self._is_running, True
        if is_first:
            in_daemon_thread(self._run, "agent-end")
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        while True:
            with self._mutex:
                ended, self._waiting = self._waiting, []
                self._is_running = bool(ended)
            if not ended:
                return
            error: Exception | None = None
            try:
                self._scan({session for session, _, _ in ended}, {mark for _, mark, _ in ended})
            except Exception as failure:  # noqa: BLE001 (raised where the scan is awaited)
                error = failure
            for _, _, done in ended:
                done.set_result(None) if error is None else done.set_exception(error)


def _kill_all_of(sessions: Set[int], marks: Set[bytes]) -> None:
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            is_theirs = os.getsid(pid) in sessions
            if is_theirs or not marks.isdisjoint(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                os.kill(pid, signal.SIGKILL)
