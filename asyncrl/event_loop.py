"""The running event loop: its clock, cancellation, and deadlines of peers.

A deadline of a *peer* (an engine, an actor, a service, another process of the run) must not blame it for our own loop.
uvloop runs timers before it reads sockets.  After a callback that blocked the loop, ``asyncio.timeout`` therefore ends
waits whose answer has already arrived, and a healthy engine would count as silent.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self, final

LATE_S = 0.02
"""Seconds by which a timer may be late without the loop counting as blocked."""
TURNS = 3
"""Iterations of the loop between the end of a peer's time and the verdict.

In the first, uvloop reads the sockets; in the second, the waiting task takes the answer; in the third, a task that
waits for that one.
"""
_BLOCKED: ContextVar[Callable[[], float]] = ContextVar("seconds for which the loop was blocked", default=lambda: 0.0)


def loop_time() -> float:
    """Return the loop's clock in seconds: monotonic in a run, virtual in a simulation."""
    return asyncio.get_running_loop().time()


def is_cancelled() -> bool:
    """Return whether the running task itself was cancelled, not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def blocked_time(seconds: Callable[[], float]) -> Iterator[None]:
    """Let the deadlines of the block, and of the tasks that it starts, know for how long the loop was blocked.

    ``seconds`` returns the time since any moment.  Without it a deadline notices only a block that lasts beyond it.
    """
    token = _BLOCKED.set(seconds)
    try:
        yield
    finally:
        _BLOCKED.reset(token)


@final
class PeerTimer:
    """A timer that calls ``expired`` once a peer has had ``seconds`` in which the loop could have heard it.

    Time for which the loop was blocked does not count.  Then the loop gets ``TURNS`` iterations to read what has
    arrived.  On a virtual clock, where nothing blocks, the timer is exact.  A block costs the peer at most all of its
    ``seconds``: a driver that was stopped for an hour gives no peer another hour.
    """

    __slots__ = ("_blocked_before", "_blocked_s", "_expired", "_handle", "_loop", "_seconds", "_when")

    def __init__(self, seconds: float, expired: Callable[[], object]) -> None:
        # Invariant: only the loop's thread uses the timer.  ``cancel`` cancels the one handle that is pending, so
        # ``expired`` is never called after it.
        self._loop = asyncio.get_running_loop()
        self._blocked_s = _BLOCKED.get()
        self._expired = expired
        self._wait(max(0.0, seconds), 0.0)  # a time in the past would count as a block

    def when(self) -> float:
        """Return the loop's time at which the peer's time ends, unless the loop is blocked before."""
        return self._when

    def cancel(self) -> None:
        """Stop the timer.  No-op after its end."""
        self._handle.cancel()

    def _wait(self, seconds: float, late: float) -> None:
        self._seconds = seconds
        self._blocked_before = self._blocked_s() + late
        self._when = self._loop.time() + seconds
        self._handle: asyncio.Handle = self._loop.call_at(self._when, self._end)

    def _end(self) -> None:
        """Give back the time for which the loop was blocked, or begin the last turns."""
        # The meter has not seen the block that has just ended: its task runs after the timers of this iteration.
        late = self._loop.time() - self._when
        owed = self._blocked_s() - self._blocked_before + late
        if owed > LATE_S:
            self._wait(min(owed, self._seconds), late)
        else:
            self._turn(TURNS)

    def _turn(self, left: int) -> None:
        if left:
            self._handle = self._loop.call_soon(self._turn, left - 1)
        else:
            self._expired()


@final
class Deadline:
    """A time limit for waits on a peer: ``async with Deadline(5.0)`` raises TimeoutError, like ``asyncio.timeout``.

    All waits on engines, actors, services and threads use it.  ``seconds`` None or infinite: no limit.
    """

    __slots__ = ("_seconds", "_timeout", "_timer")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: PeerTimer | None = None

    def expired(self) -> bool:
        """Return whether the time ended before the block did."""
        return self._timeout.expired()

    def give(self, seconds: float) -> None:
        """Let the time end ``seconds`` from now instead.

        No-op outside the block, without a limit, and after the end.
        """
        if self._timer is not None and not self._timeout.expired():
            self._timer.cancel()
            self._timer = PeerTimer(seconds, self._expire)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        if self._seconds is not None and self._seconds != math.inf:
            self._timer = PeerTimer(self._seconds, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._timeout.__aexit__(kind, error, trace)

    def _expire(self) -> None:
        self._timeout.reschedule(loop_time())
