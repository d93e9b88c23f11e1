"""An event loop on virtual time: an hour of waiting takes no time, and waiting forever raises Deadlock."""

import asyncio
import contextlib
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from asyncrl.internals import Internal

INTERNALS = (
    Internal(name="asyncio.BaseEventLoop._run_once", parameters=("self",), is_exact=True, used_in=__name__),
    Internal(name="asyncio.BaseEventLoop.run_forever", attributes=("_run_once",), used_in=__name__),
    Internal(
        name="asyncio.Handle",
        parameters=("callback", "args", "loop", "context"),
        attributes=("_run",),
        used_in=__name__,
    ),
    Internal(name="asyncio.TimerHandle", parameters=("when", "callback", "args", "loop", "context"), used_in=__name__),
)
"""Library names that may change without notice; see docs/internals.md."""

_SAME_MOMENT_S = 1e-9
"""Timers closer than this fire together, as on Python's own loops under Linux: float sums differ in their last bits."""
_FEW_TIMERS = 100
"""Below this number of timers, cancelled ones stay in the heap until they are due, as on Python's own loops."""


class Deadlock(Exception):
    """Raised when every task waits and no timer is left that could wake one."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose ``time()`` starts at 0 and moves only when every task waits.

    Nothing outside can wake it (no socket, no thread, no signal), so it makes no system call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._soon = deque[asyncio.Handle]()
        self._later: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap, ordered by time and then by call order."""
        self._orders = itertools.count()
        self._many_timers = _FEW_TIMERS

    def time(self) -> float:
        """Virtual seconds since the loop was created."""
        return self._now

    def call_soon[*Ts](
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run ``callback`` in the next iteration of the loop."""
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def call_at[*Ts](
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run ``callback`` when the clock reaches ``when``."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._later, (when, next(self._orders), timer))
        return timer

    def _run_once(self) -> None:
        """Run the callbacks scheduled before this iteration.  Replaces the method of the base class, which selects."""
        soon = self._soon
        if not soon:
            self._jump()
        for _ in range(len(soon)):
            handle = soon.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 (this is the loop)

    def _jump(self) -> None:
        """Move the clock to the next timer.  Raises Deadlock if there is none."""
        later = self._later
        if len(later) > self._many_timers:  # most are timeouts that were cancelled in time
            later[:] = [entry for entry in later if not entry[-1].cancelled()]
            heapq.heapify(later)
            self._many_timers = _FEW_TIMERS + 2 * len(later)
        while later and later[0][-1].cancelled():
            heapq.heappop(later)
        if not later or later[0][0] == math.inf:
            raise Deadlock(f"at {self._now:g} s")
        self._now = max(self._now, later[0][0])
        while later and later[0][0] < self._now + _SAME_MOMENT_S:
            self._soon.append(heapq.heappop(later)[-1])


def run_virtually[T](main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run ``main`` on a new VirtualLoop; returns its result and the virtual seconds it took."""
    loop = VirtualLoop()
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task), loop.time()
    finally:
        if not task.done():  # a deadlock, or an interrupt
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()
