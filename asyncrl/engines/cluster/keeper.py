"""Starts engines again that end, and says who is there.

    ends ──▶ gets no more requests ──▶ started again ──▶ takes part in an update ──▶ gets requests

Samples that were on it go on elsewhere, or when it is back, behind the tokens that had arrived.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.engines.cluster.calls import together
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.roster import Roster
from asyncrl.errors import ServerFailed

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """Who gets requests."""

    def leave(self, url: str) -> None:
        """Not this one any more."""

    def join(self, url: str) -> None:
        """This one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine, and how to start it."""

    url: str
    server: Server
    start: Callable[[], Awaitable[None]]
    """Returns when it is ready.  Raises ServerFailed or EngineTimeout."""


class EngineKeeper:
    """Of all engines of a run."""

    def __init__(self, engines: Sequence[StartedEngine], roster: Roster[Any], pool: Pool, *, max_restarts: int) -> None:
        """``max_restarts`` of all engines together; the next one that ends, ends the run."""
        self.engines = tuple(engines)
        self._roster = roster
        self._pool = pool
        self._max_restarts = max_restarts
        self._restarts = 0

    async def keep(self) -> None:
        """Until cancelled.  Raises ServerFailed, or EngineTimeout when one does not become ready again."""
        await together([self._keep(engine) for engine in self.engines])

    async def _keep(self, engine: StartedEngine) -> None:
        while True:
            try:
                await engine.server.watch()
            except ServerFailed as error:
                if self._restarts == self._max_restarts:
                    raise
                self._restarts += 1
                logger.warning("%s; started again, %d of %d times", error, self._restarts, self._max_restarts)
            self._roster.lose(engine.url)
            self._pool.leave(engine.url)
            await engine.server.stop()
            await engine.start()
            self._roster.come(engine.url)
            await self._roster.served(engine.url)
            self._pool.join(engine.url)
            logger.info("%s is back, with the present weights", engine.server.name)
