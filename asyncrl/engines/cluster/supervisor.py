"""Restarts engines that end, and keeps the membership and the request pool up to date.

    ends or is unresponsive ─▶ gets no more requests ─▶ restarted ─▶ takes part in an update ─▶ gets requests directly
                                                                                             ─▶ through the router

Samples that were on the engine keep the tokens that had arrived.  They resume on another engine, or on this one once it
is back.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from asyncrl.engines.cluster.calls import together
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import EngineError, EngineTimeout, ServerFailed, plainly

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Seconds by which the wait before each further start attempt grows; the obstacle may be gone by then."""
ASK_EVERY_S = 10.0
"""Seconds between two liveness probes of a running engine."""


class Pool(Protocol):
    """The engines that get requests."""

    def leave(self, url: str) -> None:
        """Send no more requests to this engine."""

    def join(self, url: str) -> None:
        """Send requests to this engine again."""

    async def route(self, url: str) -> None:
        """Return once the router may send requests to this engine again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine, with functions to start and probe it."""

    url: str
    server: Server
    start: Callable[[], Awaitable[None]]
    """Starts the engine and returns once it is ready.  Raises ServerFailed."""
    probe: Callable[[], Awaitable[None]]
    """Returns once the process that uses the GPU answers.

    Raises EngineTimeout after the deadline of a request, or another EngineError.
    """


class EngineSupervisor:
    """Restarts the engines of a run when they end or stop answering."""

    def __init__(
        self, engines: Sequence[StartedEngine], membership: EngineMembership[Any], pool: Pool, *, max_restarts: int
    ) -> None:
        """Allow ``max_restarts`` restarts of all engines together; the next end or failed start ends the run."""
        self.engines = tuple(engines)
        self._membership = membership
        self._pool = pool
        self._max_restarts = max_restarts
        self._restarts = 0

    async def keep(self) -> None:
        """Run until cancelled.  Raises ServerFailed when no restarts are left."""
        await together([self._keep(engine) for engine in self.engines])

    async def _keep(self, engine: StartedEngine) -> None:
        watch: Callable[[], Awaitable[None]] = partial(self._watch, engine)
        while True:
            try:
                await watch()
            except ServerFailed as error:
                self._count(error)
            self._pool.leave(engine.url)
            await self._bring_back(engine)
            self._pool.join(engine.url)
            logger.info("%s is back, with the present weights", engine.server.name)
            watch = partial(self._watch_and_route, engine)

    async def _watch(self, engine: StartedEngine) -> None:
        """Run until cancelled.  Raises ServerFailed when the engine ends or is unresponsive."""
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.server.watch(), name=f"watch-{engine.server.name}")
                tasks.create_task(_ask(engine), name=f"ask-{engine.server.name}")
                why = await self._membership.wait_until_unresponsive(engine.url)
                raise ServerFailed(f"{engine.server.name} {why}")

    async def _watch_and_route(self, engine: StartedEngine) -> None:
        """Watch the engine, and have the router send requests to it once it can.  Raises ServerFailed as ``_watch``."""
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pool.route(engine.url), name=f"route-{engine.server.name}")
                await self._watch(engine)

    async def _bring_back(self, engine: StartedEngine) -> None:
        """Restart the engine until it has the current weights.

        Each failed start, and each end before it has them, counts as a restart.
        """
        for attempt in itertools.count():
            self._membership.mark_lost(engine.url)
            await engine.server.stop()
            await asyncio.sleep(attempt * AGAIN_S)
            try:
                await engine.start()
                self._membership.mark_restarted(engine.url)
                await self._served(engine)
            except ServerFailed as error:
                self._count(error)
            else:
                return

    async def _served(self, engine: StartedEngine) -> None:
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(engine), name=f"keep-{engine.server.name}")
                await self._membership.wait_until_synced(engine.url)
                watching.cancel()

    def _count(self, error: ServerFailed) -> None:
        if self._restarts == self._max_restarts:
            raise error
        self._restarts += 1
        logger.warning("%s; restarting it (restart %d of at most %d)", error, self._restarts, self._max_restarts)


async def _ask(engine: StartedEngine) -> None:
    """Probe the engine until cancelled.  Raises ServerFailed if it lives and does not answer."""
    while True:
        await asyncio.sleep(ASK_EVERY_S)
        try:
            await engine.probe()
        except EngineTimeout as error:
            raise ServerFailed(f"{engine.server.name} lives and does not answer: {error}") from error
        except EngineError:  # it has died, which ``watch`` notices, or it is an SGLang without this command
            continue
