"""The delay of the driver's event loop.  A long delay means that something blocks the loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

_LATE_S = 0.02
"""Seconds of a delay from which the loop was blocked.  Shorter ones are those of timers and of a busy machine."""


class LoopLag:
    """The longest delay since it was last read, and the sum of all delays."""

    def __init__(self) -> None:
        # Invariant: read and reset by the event loop's thread alone; another one could lose an observation.
        self._max_s = 0.0
        self._total_s = 0.0

    def observe(self, late_s: float) -> None:
        """Record that the loop resumed ``late_s`` seconds later than requested."""
        self._max_s = max(self._max_s, late_s)
        if late_s > _LATE_S:
            self._total_s += late_s

    def blocked_s(self) -> float:
        """Return the seconds for which the loop was blocked so far, as the sum of its long delays."""
        return self._total_s

    def take_max_ms(self) -> float:
        """Return the longest delay since the last call, in milliseconds, and reset it."""
        longest_s, self._max_s = self._max_s, 0.0
        return 1000.0 * longest_s


async def watch_loop(
    lag: LoopLag,
    period_s: float = 0.05,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NoReturn:
    """Measure until cancelled.  ``clock`` defaults to the running loop's.

    Delays shorter than ``period_s`` can be missed.  Do not start this task on a virtual clock: a loop with a sleeping
    task is never deadlocked.
    """
    now = clock or asyncio.get_running_loop().time
    while True:
        due_s = now() + period_s
        await sleep(period_s)
        lag.observe(now() - due_s)
