"""The watchdog: ends a run in which neither a token nor a group arrives."""

import asyncio
from collections.abc import Callable

from asyncrl.errors import Stalled
from asyncrl.event_loop import Deadline, loop_time


class Watchdog:
    """Raises Stalled if neither a token nor a group arrives for ``timeout_s`` seconds during a ``wait``."""

    def __init__(self, timeout_s: float, who_waits_for_whom: Callable[[], str]) -> None:
        """``who_waits_for_whom`` returns the text for Stalled."""
        self.timeout_s = timeout_s
        self._who_waits_for_whom = who_waits_for_whom
        self._last_move = 0.0

    def moved(self) -> None:
        """Record that a token arrived, a group ended, or an episode asked an engine after its tools."""
        self._last_move = loop_time()

    async def wait(self, event: asyncio.Event) -> None:
        """Wait for ``event``.  Raises Stalled, with the text at that moment."""
        waiting_since = loop_time()
        while not event.is_set():
            heard = max(waiting_since, self._last_move)
            try:
                async with Deadline(heard + self.timeout_s - loop_time()):
                    await event.wait()
            except TimeoutError as error:
                if self._last_move > heard or event.is_set():
                    continue
                raise Stalled(
                    f"no token and no group for {self.timeout_s:g} s (watchdog-timeout-s): {self._who_waits_for_whom()}"
                ) from error
