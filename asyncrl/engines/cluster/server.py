"""The driver's view of a server process, which runs behind an actor."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, NoReturn

from asyncrl.engines.cluster.calls import answered
from asyncrl.errors import AsyncRLError, ServerFailed

CHECK_PERIOD_S = 0.5
"""Seconds between two checks whether a server is alive.

Short enough to report a dead server before its requests run out of retries.
"""
STOP_TIMEOUT_S = 6.0
"""Seconds for all servers to end at the end of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server process and the actor that started it."""

    name: str
    actor: Any
    timeout_s: float
    """Deadline in seconds of the actor's answers."""

    async def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        await answered(self.actor.check.remote(), f"the actor of {self.name}", self.timeout_s, ServerFailed)

    async def watch(self) -> NoReturn:
        """Run until cancelled.  Raises ServerFailed once the server has ended."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_PERIOD_S)

    async def stop(self) -> None:
        """End the server.  Never raises: a process that is left dies with its actor."""
        with contextlib.suppress(AsyncRLError):
            await answered(self.actor.stop.remote(), f"stopping {self.name}", STOP_TIMEOUT_S, ServerFailed)
