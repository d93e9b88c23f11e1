"""A server process behind its actor, as the controller sees it."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, NoReturn

from asyncrl.engines.cluster.calls import answered
from asyncrl.errors import AsyncRLError, ServerFailed

CHECK_PERIOD_S = 0.5
"""Between two looks at whether a server still lives: soon enough to name it before its requests run out of retries."""
STOP_TIMEOUT_S = 6.0
"""For all servers to end when the run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server process and the actor that watches over it."""

    name: str
    actor: Any
    timeout_s: float
    """For an answer of the actor."""

    async def check(self) -> None:
        """Raises ServerFailed when the server has ended."""
        await answered(self.actor.check.remote(), f"the actor of {self.name}", self.timeout_s, ServerFailed)

    async def watch(self) -> NoReturn:
        """Raises ServerFailed once the server has ended; runs until cancelled otherwise."""
        while True:
            await self.check()
            await asyncio.sleep(CHECK_PERIOD_S)

    async def stop(self) -> None:
        """End the server.  Never raises: whatever is left dies with its actor."""
        with contextlib.suppress(AsyncRLError):
            await answered(self.actor.stop.remote(), f"stopping {self.name}", STOP_TIMEOUT_S, ServerFailed)
