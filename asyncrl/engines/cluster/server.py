"""The driver's view of a server process, which runs behind an actor.

The server dies with its actor, and an actor with its machine.  ``renew`` then creates another actor: in the same
reserved resources, which Ray moves to another machine with room if theirs is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from asyncrl.engines.cluster.calls import answered
from asyncrl.errors import AsyncRLError, ServerFailed

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 0.5
"""Seconds between two checks whether a server is alive.

Short enough to report a dead server before its requests run out of retries.
"""
STOP_TIMEOUT_S = 6.0
"""Seconds for all servers to end at the end of the run."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """A server process and the actor that started it."""

    name: str
    actor: Any
    timeout_s: float
    """Deadline in seconds of the actor's answers."""
    create: Callable[[], Any]
    """Creates another actor; returns at once, also if there is no place for it yet."""
    kill: Callable[[Any], None]
    """Ends an actor at once, also one that has no place yet."""

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

    async def renew(self) -> None:
        """End the server, and replace its actor if that has died or does not answer.  Never raises.

        A replaced actor is killed, because it may live and only be silent; its server dies with it.
        """
        try:
            await answered(self.actor.stop.remote(), f"stopping {self.name}", STOP_TIMEOUT_S, ServerFailed)
        except AsyncRLError as error:
            logger.warning("%s; another actor takes its place", error)
            self.kill(self.actor)
            self.actor = self.create()
