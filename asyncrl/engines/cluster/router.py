"""The router's process, and its restart when it ends or no longer answers.

    ends or is silent ─▶ requests go to the engines directly ─▶ restarted ─▶ lists all engines ─▶ gets requests again

Requests that went through the router keep the tokens that had arrived, and continue on an engine at once.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.listening import url_of
from asyncrl.engines.sglang.client.control import wait_for_router
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.router import listed
from asyncrl.engines.sglang.launch import Command, RouterLaunch, router_command
from asyncrl.errors import EngineError, ServerFailed, plainly
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
"""Seconds between two liveness probes.  A router that hangs holds up every request."""
MOST_SILENT = 2
"""Failed probes in a row with which the router counts as hung: 12 s after it stopped, at most."""
AGAIN_S = 10.0
"""Seconds by which the wait before each further start attempt grows; the obstacle may be gone by then."""
LONGEST_WAIT_S = 60.0
READY_S = 90.0
"""Seconds for a restarted router to list all engines, which takes it 2 s.

An engine that is lost meanwhile is not listed; the next attempt is made without it.
"""

Run = Callable[[Server, Command, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Starts a server and returns once the given wait has ended.  Raises ServerFailed."""


class Pool(Protocol):
    """The requests' way to the engines."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines that get requests."""

    def bypass_router(self) -> None:
        """Send requests to the engines directly."""

    def use_router(self, url: str) -> None:
        """Send requests to the router at ``url`` again."""


class StartedRouter:
    """The router's process; its URL changes only if it cannot be restarted there."""

    def __init__(self, server: Server, addresses: Addresses, http: HttpClient, run: Run, launch: RouterLaunch) -> None:
        """Take key and flags from ``launch``; ``start`` finds the rest."""
        self.server = server
        self._addresses = addresses
        self._http = http
        self._run = run
        self._launch = launch
        self._actor: Any = None
        """The actor whose addresses the router has."""

    @property
    def url(self) -> str:
        """The router's URL."""
        return url_of(self._launch.host, self._launch.port)

    async def start(self, engine_urls: Sequence[str], timeout_s: float, *, at: str | None = None) -> None:
        """Start the router and return once it lists all engines as healthy.  Raises ServerFailed.

        It keeps the URL ``at``, if its actor still has that address.
        """
        if self._actor is not self.server.actor or at is None:
            host, port, prometheus_port = await self._addresses.router(self.server.actor)
            if at is None or host != self._launch.host:
                self._launch = replace(self._launch, host=host, port=port, prometheus_port=prometheus_port)
            self._actor = self.server.actor
        urls = tuple(engine_urls)
        self._launch = replace(self._launch, worker_urls=urls)
        await self._run(
            self.server,
            router_command(self._launch),
            lambda: wait_for_router(self._http, self.url, urls, timeout_s),
        )

    async def probe(self) -> None:
        """Return once the router answers.  Raises EngineError."""
        await listed(self._http, self.url)


class RouterSupervisor:
    """Restarts the router for as long as the run lasts.  Without it requests go to the engines directly."""

    def __init__(self, router: StartedRouter, pool: Pool) -> None:
        self.router = router
        self._pool = pool

    async def keep(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self._watch()
            except ServerFailed as error:
                logger.warning("%s; it is restarted, and requests go to the engines directly meanwhile", error)
            self._pool.bypass_router()
            await self._restart()
            self._pool.use_router(self.router.url)
            logger.info("the router is back at %s", self.router.url)

    async def _watch(self) -> None:
        """Run until cancelled.  Raises ServerFailed when the router ends or does not answer."""
        with plainly():
            async with TaskGroup() as tasks:
                tasks.create_task(self.router.server.watch(), name="watch-router")
                tasks.create_task(self._ask(), name="ask-router")

    async def _ask(self) -> None:
        """Probe the router until cancelled.  Raises ServerFailed if it lives and does not answer."""
        failed = 0
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            try:
                await self.router.probe()
            except EngineError as error:
                failed += 1
                if failed == MOST_SILENT:
                    raise ServerFailed(f"the router lives and does not answer: {error}") from error
            else:
                failed = 0

    async def _restart(self) -> None:
        """Restart the router until it lists all engines that get requests.  The first attempt keeps its URL."""
        for attempt in itertools.count():
            await self.router.server.renew()
            await asyncio.sleep(min(attempt * AGAIN_S, LONGEST_WAIT_S))
            try:
                await self.router.start(self._pool.urls, READY_S, at=None if attempt else self.router.url)
            except ServerFailed as error:
                logger.warning("%s; the router is started again", error)
            else:
                return
