"""Starts the engines and the router of a deployment, each behind an actor."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from asyncrl.engines.cluster.actors import ServerActor
from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.calls import answered, together
from asyncrl.engines.cluster.placement import Placement
from asyncrl.engines.cluster.router import StartedRouter
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.cluster.settings import Deployment
from asyncrl.engines.cluster.supervisor import StartedEngine
from asyncrl.engines.listening import url_of
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.installed_plugins import EnginePlugins, missing_warning, start_hint
from asyncrl.engines.sglang.launch import Command, RouterLaunch, ServerLaunch, server_command
from asyncrl.errors import EngineError, EngineTimeout, ForeignServer, ServerFailed, plainly
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)


class Servers:
    """The servers of a deployment on its reserved resources."""

    def __init__(self, placement: Placement, deployment: Deployment, http: HttpClient, addresses: Addresses) -> None:
        self._placement = placement
        self._deployment = deployment
        self._cluster = deployment.cluster
        self._failures = deployment.failures
        self._http = http
        self._addresses = addresses
        self.all: list[Server] = []
        """The servers whose actors have been created."""
        self.plugins: dict[str, EnginePlugins | None] = {}
        """Our plug-ins in each engine, by the engine's name; None if the engine did not answer."""

    async def start(self, gpus: Sequence[Sequence[str]]) -> tuple[tuple[StartedEngine, ...], StartedRouter | None]:
        """Start the engines and, if configured, the router; return both once ready.

        ``gpus`` are the GPUs of each rank if engines share them, otherwise empty.
        """
        cluster = self._cluster
        # Only the router's actor starts now, because its process takes seconds.  The router itself starts later: it
        # would probe engines that are still loading.
        router = self._server("router", partial(self._placement.here, ServerActor)) if cluster.use_router else None
        engines = await together([self._engine(number, gpus) for number in range(cluster.num_engines)])
        said = {name: each for name, each in self.plugins.items() if each is not None}
        if warning := missing_warning(said, self._deployment.needed_plugins):
            logger.warning("%s", warning)
        return tuple(engines), await self._route(router, engines) if router else None

    def control(self, url: str) -> EngineControl:
        """Return the control commands of the engine at ``url``."""
        timeout_s, num_ranks = self._failures.control_timeout_s, self._deployment.ranks_per_engine
        return EngineControl(self._http, url, timeout_s=timeout_s, num_ranks=num_ranks)

    async def stop(self) -> None:
        """End every server."""
        await together([server.stop() for server in self.all])

    async def _engine(self, number: int, gpus: Sequence[Sequence[str]]) -> StartedEngine:
        deployment, trainer, cluster = self._deployment, self._deployment.trainer, self._cluster
        each = cluster.rollout_num_gpus_per_engine
        server = self._server(f"sglang-{number}", partial(self._placement.engine, ServerActor, number))
        launch = ServerLaunch(
            model_path=trainer.model.hf_checkpoint,
            host="",
            port=0,
            key=deployment.key,
            nccl_port=0,
            device=trainer.device,
            dtype=trainer.dtype,
            seed=trainer.model.seed,
            tensor_parallel=deployment.ranks_per_engine,
            returns_routes=deployment.routes is not None,
            flags=deployment.server_flags,
            shared_gpus=tuple(chain.from_iterable(gpus[number * each : (number + 1) * each]))
            if cluster.colocate
            else None,
        )

        async def start() -> EngineControl:
            # Invariant: each process has another port.  The router or the network may still hold a request for the
            # process before, which must not reach one that no update has given the trained weights.
            host, port, nccl_port = await self._addresses.engine(server.actor)
            command = server_command(replace(launch, host=host, port=port, nccl_port=nccl_port))
            control = self.control(url_of(host, port))
            await self._run(server, command, lambda: control.get_ready(cluster.start_timeout_s))
            return control

        control = await self._first_start(start)
        self.plugins[server.name] = await self._plugins_of(server, control)
        return StartedEngine(
            control=control, server=server, start=start, probe_timeout_s=self._failures.request_timeout_s
        )

    async def _first_start(self, start: Callable[[], Awaitable[EngineControl]]) -> EngineControl:
        """Start an engine for the first time.

        Raises ServerFailed, with a hint if the engine must release memory and lacks the plug-in for it.
        """
        try:
            return await start()
        except ServerFailed as error:
            if "memory_saver" in self._deployment.needed_plugins and (hint := start_hint("memory_saver")):
                raise ServerFailed(f"{error}; --colocate: {hint}") from error
            raise

    async def _plugins_of(self, server: Server, control: EngineControl) -> EnginePlugins | None:
        try:
            return await control.plugins()
        except EngineError as error:  # if the server has ended, the supervisor reports the cause
            logger.warning("%s did not say which plug-ins of asyncrl it has: %s", server.name, error)
            return None

    async def _route(self, server: Server, engines: Sequence[StartedEngine]) -> StartedRouter:
        """Start the router.  Raises ServerFailed, also if an engine ends meanwhile: the router would wait for it."""
        nowhere = RouterLaunch(
            worker_urls=(),
            host="",
            port=0,
            key=self._deployment.key,
            prometheus_port=0,
            flags=self._deployment.router_flags,
        )
        router = StartedRouter(server, self._addresses, self._http, self._run, nowhere)
        with plainly():
            async with TaskGroup() as tasks:
                watching = [
                    tasks.create_task(each.server.watch(), name=f"watch-{each.server.name}") for each in engines
                ]
                await router.start([each.url for each in engines], self._cluster.start_timeout_s)
                for watch in watching:
                    watch.cancel()
        return router

    async def _run(self, server: Server, command: Command, wait: Callable[[], Awaitable[None]]) -> None:
        """Start a server and return once it is ready."""
        await self._begin(server, command)
        await self._ready(server, wait())

    def _server(self, name: str, create: Callable[[], Any]) -> Server:
        timeout_s, kill = self._failures.control_timeout_s, self._placement.kill
        self.all.append(Server(name=name, actor=create(), timeout_s=timeout_s, create=create, kill=kill))
        return self.all[-1]

    async def _begin(self, server: Server, command: Command) -> None:
        log = self._deployment.logs / f"{server.name}.log"
        call = server.actor.start.remote(server.name, command.arguments, command.environment, log, command.key)
        await answered(call, f"starting {server.name}", self._cluster.start_timeout_s, ServerFailed)

    async def _ready(self, server: Server, waiting: Awaitable[None]) -> None:
        """Wait until the server is ready.  Raises ServerFailed if it ends, or is not ready in time."""
        try:
            with plainly():
                async with TaskGroup() as tasks:
                    watch = tasks.create_task(server.watch(), name=f"watch-{server.name}")
                    await waiting
                    watch.cancel()
        except EngineTimeout as error:
            raise ServerFailed(f"{server.name}: {error} (start-timeout-s)") from error
        except ForeignServer as error:
            raise ForeignServer(f"{server.name}: {error}") from error
