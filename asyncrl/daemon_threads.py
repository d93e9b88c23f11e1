"""Threads that nothing waits for at the end of the process.

Python joins the threads of ``asyncio.to_thread`` when an event loop closes and when the interpreter exits.  One call
that never returns would keep the program, and the GPUs of its processes, for ever.  So:

    our own blocking calls   off_loop, in_daemon_thread: one thread per call
    user code on a loop      DaemonThreads as the loop's default executor, for its ``asyncio.to_thread``

Invariant of both: only the thread completes its future.  At the end of the process the thread stops wherever it is, so
its work must leave nothing on disk that could be taken for complete.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from asyncrl import mischief

type Job = tuple[Future[Any], Callable[[], Any]]


def in_daemon_thread[T](work: Callable[[], T], name: str) -> Future[T]:
    """Start ``work`` in a daemon thread; the future completes with it, and cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on the future cannot be cancelled
    Thread(target=_complete, args=(future, work), name=name, daemon=True).start()
    return future


async def off_loop[T](work: Callable[[], T], name: str) -> T:
    """Return the result of ``work``, which runs in a daemon thread.

    Cancelling this does not end the thread, which nothing waits for any more.  A simulation has no threads: there
    ``work`` runs on the loop.
    """
    if mischief.is_installed():
        await asyncio.sleep(0)
        return work()
    return await asyncio.wrap_future(in_daemon_thread(work, name))


class DaemonThreads(ThreadPoolExecutor):
    """A pool of daemon threads for calls of user code, at most ``max_workers``.

    A call that hangs keeps its thread.  ``shutdown`` returns at once: waiting calls are cancelled, and running ones are
    left alone.  It derives from ThreadPoolExecutor because event loops demand one as their default executor, and
    replaces all of its public methods.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        super().__init__(max_workers)
        self._most = max_workers
        self._name = name
        self._jobs = SimpleQueue[Job | None]()
        self._mutex = Lock()
        self._num_threads = 0
        self._num_open = 0
        """Calls that wait or run."""
        self._is_shut = False

    def submit[**P, T](self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn`` in a thread.  Raises RuntimeError after ``shutdown``."""
        future: Future[T] = Future()
        with self._mutex:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._num_open += 1
            self._jobs.put((future, partial(fn, *args, **kwargs)))
            if self._num_threads < min(self._num_open, self._most):
                self._num_threads += 1
                Thread(target=self._work, name=f"{self._name}-{self._num_threads}", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls, and cancel the waiting ones.  Never waits, whatever ``wait`` is."""
        with self._mutex:
            self._is_shut = True
        with suppress(Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if future.set_running_or_notify_cancel():
                _complete(future, work)
            del job, future, work  # an idle thread keeps no result alive
            with self._mutex:
                self._num_open -= 1


def _complete(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 (raised where the future is awaited)
        future.set_exception(_plain(error))
    else:
        future.set_result(result)


def _plain(error: BaseException) -> Exception:
    """Replace exceptions that would end or hang an event loop that waits for the thread."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    plain = RuntimeError(f"raised {type(error).__name__}: {error}")
    plain.__cause__ = error
    return plain
