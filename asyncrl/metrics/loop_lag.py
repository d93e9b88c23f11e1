"""How late the controller's event loop is.  A late loop means that something blocks it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn


class LoopLag:
    """Remembers the longest delay until somebody takes it."""

    def __init__(self) -> None:
        # Invariant: read and reset by the event loop's thread alone; another one could lose an observation.
        self._max_s = 0.0

    def observe(self, late_s: float) -> None:
        """The loop came back this much later than it was asked to."""
        self._max_s = max(self._max_s, late_s)

    def take_max_ms(self) -> float:
        """The longest delay since this was last called, in milliseconds."""
        longest_s, self._max_s = self._max_s, 0.0
        return 1000.0 * longest_s


async def watch_loop(
    lag: LoopLag,
    period_s: float = 0.05,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NoReturn:
    """Measure until cancelled.  ``clock`` is the running loop's unless given.

    Shorter delays than ``period_s`` between two looks can be missed.  On a virtual clock leave this task out: a loop
    with a sleeper is never seen to be stuck.
    """
    now = clock or asyncio.get_running_loop().time
    while True:
        due_s = now() + period_s
        await sleep(period_s)
        lag.observe(now() - due_s)
