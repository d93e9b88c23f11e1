"""Sees when nothing moves any more."""

import asyncio
from collections.abc import Callable

from asyncrl.errors import Stalled


class Watchdog:
    """Raises Stalled once there was neither a token nor a group for ``timeout_s`` while somebody waits."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._last_move = 0.0

    def moved(self) -> None:
        """A token came, or a group was done."""
        self._last_move = _now()

    async def wait(self, event: asyncio.Event, who_waits_for_whom: Callable[[], str]) -> None:
        """Wait for ``event``.  Raises Stalled, with what ``who_waits_for_whom`` says then."""
        waiting_since = _now()
        while not event.is_set():
            deadline = max(waiting_since, self._last_move) + self.timeout_s
            if _now() >= deadline:
                raise Stalled(
                    f"no token and no group for {self.timeout_s:g} s (watchdog-timeout-s): {who_waits_for_whom()}"
                )
            try:
                async with asyncio.timeout_at(deadline):
                    await event.wait()
            except TimeoutError:
                continue


def _now() -> float:
    return asyncio.get_running_loop().time()
