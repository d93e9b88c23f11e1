"""Starts engines again that end, and says who is there.

    ends, or is condemned ─▶ gets no more requests ─▶ started again ─▶ takes part in an update ─▶ gets requests
                                                                                            ─▶ through the router

Samples that were on it go on elsewhere, or when it is back, behind the tokens that had arrived.
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
"""Until another attempt, and as much longer each time: what was in the way may be gone then."""
ASK_EVERY_S = 10.0
"""Whether an engine that lives does anything."""


class Pool(Protocol):
    """Who gets requests."""

    def leave(self, url: str) -> None:
        """Not this one any more."""

    def join(self, url: str) -> None:
        """This one again."""

    async def route(self, url: str) -> None:
        """Return once requests may come to it through the router again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine, and how to start it."""

    url: str
    server: Server
    start: Callable[[], Awaitable[None]]
    """Returns when it is ready.  Raises ServerFailed."""
    probe: Callable[[], Awaitable[None]]
    """Returns once what has the GPU answers.  Raises EngineTimeout when requests would have, too, and EngineError."""


class EngineSupervisor:
    """Of all engines of a run."""

    def __init__(
        self, engines: Sequence[StartedEngine], membership: EngineMembership[Any], pool: Pool, *, max_restarts: int
    ) -> None:
        """``max_restarts`` of all engines together; the next one that ends, or does not start, ends the run."""
        self.engines = tuple(engines)
        self._membership = membership
        self._pool = pool
        self._max_restarts = max_restarts
        self._restarts = 0

    async def keep(self) -> None:
        """Until cancelled.  Raises ServerFailed when there are no more restarts."""
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
        """Raises ServerFailed when it ends, or is to end."""
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.server.watch(), name=f"watch-{engine.server.name}")
                tasks.create_task(_ask(engine), name=f"ask-{engine.server.name}")
                why = await self._membership.wait_until_unresponsive(engine.url)
                raise ServerFailed(f"{engine.server.name} {why}")

    async def _watch_and_route(self, engine: StartedEngine) -> None:
        """Raises ServerFailed when it ends, or is to end."""
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pool.route(engine.url), name=f"route-{engine.server.name}")
                await self._watch(engine)

    async def _bring_back(self, engine: StartedEngine) -> None:
        """Return when it has the present weights; it may not start, or end once more, before."""
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
        logger.warning("%s; started again, %d of %d times", error, self._restarts, self._max_restarts)


async def _ask(engine: StartedEngine) -> None:
    """Raises ServerFailed when it lives and does not answer."""
    while True:
        await asyncio.sleep(ASK_EVERY_S)
        try:
            await engine.probe()
        except EngineTimeout as error:
            raise ServerFailed(f"{engine.server.name} lives and does not answer: {error}") from error
        except EngineError:  # it has died, which the watch sees; or is another SGLang, which has no such command
            continue
