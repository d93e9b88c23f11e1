"""A thread for calls of user functions, which may block."""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

from asyncrl.errors import ConfigError, HookFailed
from asyncrl.event_loop import Deadline

type Job = tuple[Callable[[], Any], Future[Any]]


class HookLate(HookFailed):
    """A call took too long; its thread is still busy."""


class Caller(Protocol):
    """Runs calls of user functions one after the other, off the event loop."""

    async def call[T](self, function: Callable[[], T], name: str, timeout_s: float) -> T:
        """Return the result of ``function``.  Raises HookFailed, which begins with ``name``."""

    def call_now[T](self, function: Callable[[], T], name: str, timeout_s: float) -> T:
        """Wait for the result of ``function`` without an event loop.  Raises HookFailed or its ConfigError."""


class Worker:
    """One daemon thread, started by its first call.  All calls of one user object run in it, in order.

    A daemon thread, because a user function that hangs must not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs = SimpleQueue[Job]()
        self._thread: Thread | None = None

    async def call[T](self, function: Callable[[], T], name: str, timeout_s: float) -> T:
        """Return the result of ``function``; after ``timeout_s`` the thread stays busy and HookFailed is raised."""
        future = asyncio.wrap_future(self._submit(function))
        deadline = Deadline(timeout_s)
        try:
            async with deadline:
                return await future
        except Exception as error:
            raise _failure(name, error, timeout_s, late=deadline.expired()) from error

    def call_now[T](self, function: Callable[[], T], name: str, timeout_s: float) -> T:
        """Wait for the result of ``function`` without an event loop.  Raises HookFailed or its ConfigError."""
        future = self._submit(function)
        try:
            return future.result(timeout_s)
        except ConfigError:  # a mistake that is found before anything starts keeps its line
            raise
        except Exception as error:
            late = isinstance(error, TimeoutError) and not future.done()
            raise _failure(name, error, timeout_s, late=late) from error

    def _submit[T](self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((function, future))
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        # Invariant: only this thread completes a future.  A future whose caller gave up before its turn is skipped.
        while True:
            function, future = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 (a user function may raise anything; its caller raises it)
                future.set_exception(_plain(error))
            else:
                future.set_result(result)


def _plain(error: BaseException) -> Exception:
    """Replace SystemExit, StopIteration and cancellations, which would end or hang the event loop."""
    # asyncio.wrap_future turns the CancelledError of concurrent.futures, an Exception, into a cancellation of the task.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    return RuntimeError(f"raised {type(error).__name__}: {error}")


def _failure(name: str, error: Exception, timeout_s: float, *, late: bool) -> HookFailed:
    if late:
        return HookLate(f"{name}: no result within {timeout_s:g} s")
    if isinstance(error, HookFailed):
        return HookFailed(f"{name}: {error}")
    return HookFailed(f"{name}: {type(error).__name__}: {error}")
