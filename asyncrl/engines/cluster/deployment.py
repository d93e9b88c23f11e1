"""Placement and start of everything that a run needs: engines, router, trainer ranks, and the weight-update group.

placement ──▶ engines (SGLang) ──▶ router ─┐
         └──▶ trainer ranks (Megatron) ────┴──▶ weight-update group

On shared GPUs the ranks load last: after the engines have loaded, measured the free memory, and released theirs.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from asyncrl.config.areas import ClusterConfig, FailureConfig
from asyncrl.config.derived import max_engine_restarts
from asyncrl.engines.cluster.actors import RankActor, ServerActor
from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.calls import answered, together
from asyncrl.engines.cluster.placement import Layout, Placement, reserve
from asyncrl.engines.cluster.ray_trainer import RayTrainer
from asyncrl.engines.cluster.router import RouterSupervisor, StartedRouter
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.gpu_sharing import SharedGpus, release_engines
from asyncrl.engines.megatron.checkpoint.directory import Origin
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.loads import EngineLoads
from asyncrl.engines.sglang.client.routes import RoutesShape
from asyncrl.engines.sglang.installed_plugins import EnginePlugins, Plugin, missing_warning, start_hint
from asyncrl.engines.sglang.launch import Command, Flags, RouterLaunch, ServerLaunch, server_command
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.cuda_ipc import TensorUpdater
from asyncrl.engines.weight_sync.disk import DiskUpdater
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.round import PauseMode
from asyncrl.errors import (
    EngineError,
    EngineTimeout,
    ForeignServer,
    GpuSharingFailed,
    ServerFailed,
    UpdateInterrupted,
    plainly,
)
from asyncrl.event_loop import Deadline
from asyncrl.models.shape import ModelShape
from asyncrl.protocols import GpuSharing, WeightUpdater
from asyncrl.types import Weights

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds for a server whose connections are closed to be found dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The settings of a deployment."""

    cluster: ClusterConfig
    """The numbers of engines, ranks and GPUs.  The device is the one of ``trainer``, where "auto" is resolved."""
    failures: FailureConfig
    trainer: TrainerSettings
    """The trainer's settings.  Engines serve its model, on the same kind of device and in the same dtype."""
    server_flags: Flags = field(default_factory=dict)
    router_flags: Flags = field(default_factory=dict)
    logs: Path
    """Folder for the servers' output."""
    key: str = field(default_factory=secrets.token_urlsafe, repr=False)
    """The key of this run, which engines and router want with every request; random unless the user chose it."""
    origin: Origin | None = None
    """The checkpoint of the trainer's first weights; None for the weights in the model's folder."""
    pause_mode: PauseMode = "in_place"
    """The effect of a weight update on requests in flight."""
    disk: Path | None = None
    """Folder, not existing yet, through which weights reach the engines; None to broadcast them."""
    routes: RoutesShape | None = None
    """The shape of the routes of experts that the engines return; None if they return none."""

    @property
    def ranks_per_engine(self) -> int:
        """The tensor-parallel size of an engine; 1 on a CPU."""
        return self.cluster.rollout_num_gpus_per_engine if self.trainer.device == "cuda" else 1

    @property
    def needed_plugins(self) -> tuple[Plugin, ...]:
        """Our plug-ins inside SGLang that this run uses."""
        always: tuple[Plugin, ...] = ("stamps",) if self.routes is None else ("stamps", "routes")
        if self.cluster.colocate:
            return (*always, "memory_saver") if self.trainer.device == "cuda" else always
        return (*always, "direct") if self.disk is None else always

    @property
    def layout(self) -> Layout:
        """The processes to place, and their GPUs."""
        return Layout(
            device=self.trainer.device,
            num_ranks=self.cluster.num_trainer_ranks,
            num_engines=self.cluster.num_engines,
            gpus_per_engine=self.cluster.rollout_num_gpus_per_engine,
            is_shared=self.cluster.colocate,
            tensor_parallel=self.trainer.parallel.tensor_model_parallel_size,
        )


def routes_shape(shape: ModelShape) -> RoutesShape | None:
    """Return the shape of the routes of a mixture of experts; None for a dense model, which has none."""
    experts = shape.experts
    if experts is None:
        return None
    return RoutesShape(
        num_layers=shape.num_layers,
        num_dense_layers=experts.num_dense_layers,
        num_experts=experts.num_experts,
        num_chosen=experts.num_chosen,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A deployment that is ready."""

    engine: SGLangEngine
    url: str
    """URL of the router; of the first engine without a router."""
    key: str = field(repr=False)
    """The key that engines and router want with every request."""
    trainer: RayTrainer
    updater: WeightUpdater
    load_probe: EngineLoads
    supervisor: EngineSupervisor
    router: RouterSupervisor | None = None
    """None without a router."""
    release_resources: Callable[[], None]
    """Ends the ranks, for another deployment in the same session; a run leaves this to Ray's shutdown."""
    gpu_sharing: GpuSharing | None = None
    """The time-sharing of the GPUs, which the trainer holds first; None if trainer and engines have separate GPUs."""
    plugins: Mapping[str, EnginePlugins | None] = field(default_factory=dict)
    """Our plug-ins in each engine, by the engine's name; None if the engine did not answer."""

    async def serve(self, weights: Weights) -> None:
        """Have all engines, which have no requests, serve the trainer's current weights as ``weights``.

        Raises WeightUpdateFailed or GpuSharingFailed.
        """
        if self.gpu_sharing is not None:
            await self.gpu_sharing.acquire_for_training()
            await self.gpu_sharing.acquire_for_update()
        await self._update(weights)
        if self.gpu_sharing is not None:
            await self.gpu_sharing.acquire_for_generation()

    async def _update(self, weights: Weights) -> None:
        """Update the weights; start over if an engine is lost meanwhile."""
        while True:
            try:
                await self.updater.snapshot()
                await self.updater.publish(weights)
            except UpdateInterrupted as error:
                logger.warning("the weight update starts over: %s", error)
            else:
                return

    async def look_for_the_dead(self) -> None:
        """Raise ServerFailed if an engine that should run has ended, or ends within ``LOOK_S`` seconds."""
        await _look_for_the_dead(self.supervisor.watched)

    async def watch(self) -> None:
        """Restart engines and router when they end; run until cancelled.

        Raises ServerFailed if too few engines have a restart left.
        """
        await together([self.supervisor.keep(), *([] if self.router is None else [self.router.keep()])])


def pick_device(ray: ModuleType, wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Return the device to run on; ``auto`` chooses GPUs if the cluster has any."""
    if wanted == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return wanted


async def _look_for_the_dead(servers: Sequence[Server]) -> None:
    """Watch the servers for ``LOOK_S`` seconds.  Raises ServerFailed if one has ended.

    A killed process closes its connections some time before it can be found dead.
    """
    with contextlib.suppress(TimeoutError):
        async with Deadline(LOOK_S):
            await together([server.watch() for server in servers])


@contextlib.asynccontextmanager
async def deployed(ray: ModuleType, deployment: Deployment, phase: Callable[[str], None]) -> AsyncIterator[Running]:
    """Start everything and wait until it is ready; stop the servers afterwards, however the body ends.

    ``phase`` is called with a description of each phase.  Raises ConfigError, ServerFailed, TrainerFailed,
    GpuSharingFailed or WeightUpdateFailed.
    """
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(HttpClient(deployment.key))
        phase("placing trainer and engines")
        placement = await reserve(ray, deployment.layout, deployment.cluster.start_timeout_s)
        builder = _Builder(placement, deployment, http, phase)
        stack.push_async_callback(builder.stop)
        yield await builder.build()


class _Builder:
    """Starts one deployment on its reserved resources, and keeps track of what it started."""

    def __init__(
        self, placement: Placement, deployment: Deployment, http: HttpClient, phase: Callable[[str], None]
    ) -> None:
        self._placement = placement
        self._deployment = deployment
        self._cluster = deployment.cluster
        self._failures = deployment.failures
        self._addresses = Addresses(
            is_single_node=placement.is_single_node,
            timeout_s=self._cluster.start_timeout_s,
        )
        self._http = http
        self._phase = phase
        self._servers: list[Server] = []
        self._plugins: dict[str, EnginePlugins | None] = {}
        self._at_the_end = contextlib.AsyncExitStack()

    async def build(self) -> Running:
        """Start engines, router and ranks, and connect them."""
        cluster, failures = self._cluster, self._failures
        self._phase(f"loading the model: {cluster.num_engines} SGLang, {cluster.num_trainer_ranks} Megatron")
        try:
            async with Deadline(cluster.start_timeout_s):
                engines, router, ranks = await self._loaded()
        except TimeoutError as error:
            raise ServerFailed(f"not ready within {cluster.start_timeout_s:g} s (start-timeout-s)") from error
        trainer = self._trainer(ranks)
        urls = tuple(engine.url for engine in engines)
        self._phase("connecting trainer and engines")
        engine = SGLangEngine(
            self._http,
            urls,
            router_url=None if router is None else router.url,
            request_timeout_s=failures.request_timeout_s,
            routes=self._deployment.routes,
        )
        controls = tuple(self._control(url) for url in urls)
        membership = EngineMembership[EngineControl](controls)
        return Running(
            engine=engine,
            url=urls[0] if router is None else router.url,
            key=self._deployment.key,
            trainer=trainer,
            updater=await self._updater(controls, membership, trainer, ranks[0]),
            load_probe=EngineLoads(self._http, lambda: engine.urls),
            supervisor=EngineSupervisor(
                engines,
                membership,
                engine,
                max_restarts=max_engine_restarts(failures, cluster),
                min_engines=cluster.num_engines if cluster.colocate else 1,
                slow_share=0.0 if cluster.colocate else failures.slow_engine_share,
            ),
            router=None if router is None else RouterSupervisor(router, engine),
            release_resources=self._placement.release_resources,
            gpu_sharing=SharedGpus(controls, trainer, holder="trainer", timeout_s=failures.control_timeout_s)
            if cluster.colocate
            else None,
            plugins=self._plugins,
        )

    async def _loaded(self) -> tuple[tuple[StartedEngine, ...], StartedRouter | None, tuple[Any, ...]]:
        """Load engines and ranks; return the engines, the router and the ranks.

        They load at the same time, except on shared GPUs, where the ranks load after the engines.
        """
        ranks = tuple(self._placement.rank(RankActor, rank) for rank in range(self._cluster.num_trainer_ranks))
        if not self._cluster.colocate:
            (engines, router), _ = await together([self._engines([]), self._load(ranks)])
            return engines, router, ranks
        gpus = await self._every(ranks, "GPUs", lambda actor, _: actor.gpus.remote())
        engines, router = await self._engines(gpus)
        try:
            await release_engines([self._control(engine.url) for engine in engines], self._failures.control_timeout_s)
        except GpuSharingFailed:
            await _look_for_the_dead(self._servers)
            raise
        await self._load(ranks)
        return engines, router, ranks

    async def stop(self) -> None:
        """End every server, and remove the folder of weights, if there is one."""
        async with self._at_the_end:
            await together([server.stop() for server in self._servers])

    # ---- engines and router

    async def _engines(self, gpus: Sequence[Sequence[str]]) -> tuple[tuple[StartedEngine, ...], StartedRouter | None]:
        """Start the engines and, if configured, the router; return both once ready.

        ``gpus`` are the GPUs of each rank if engines share them, otherwise empty.
        """
        cluster = self._cluster
        # Only the router's actor starts now, because its process takes seconds.  The router itself starts later: it
        # would probe engines that are still loading.
        router = self._server("router", partial(self._placement.anywhere, ServerActor)) if cluster.use_router else None
        engines = await together([self._engine(number, gpus) for number in range(cluster.num_engines)])
        said = {name: each for name, each in self._plugins.items() if each is not None}
        if warning := missing_warning(said, self._deployment.needed_plugins):
            logger.warning("%s", warning)
        urls = tuple(engine.url for engine in engines)
        return tuple(engines), await self._route(router, urls) if router else None

    async def _engine(self, number: int, gpus: Sequence[Sequence[str]]) -> StartedEngine:
        deployment, trainer, cluster = self._deployment, self._deployment.trainer, self._cluster
        each = cluster.rollout_num_gpus_per_engine
        server = self._server(f"sglang-{number}", partial(self._placement.engine, ServerActor, number))
        actor = server.actor
        host, port, nccl_port = await self._addresses.engine(actor)
        launch = ServerLaunch(
            model_path=trainer.model.hf_checkpoint,
            host=host,
            port=port,
            key=deployment.key,
            nccl_port=nccl_port,
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
            nonlocal actor, launch
            if server.actor is not actor:  # it was replaced, maybe on another machine
                host, port, nccl_port = await self._addresses.engine(server.actor)
                actor, launch = server.actor, replace(launch, host=host, port=port, nccl_port=nccl_port)
            control = self._control(f"http://{launch.host}:{launch.port}")
            await self._run(server, server_command(launch), lambda: control.get_ready(cluster.start_timeout_s))
            return control

        control = await self._first_start(start)
        self._plugins[server.name] = await self._plugins_of(server, control)
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

    async def _route(self, server: Server, urls: tuple[str, ...]) -> StartedRouter:
        nowhere = RouterLaunch(
            worker_urls=(),
            host="",
            port=0,
            key=self._deployment.key,
            prometheus_port=0,
            flags=self._deployment.router_flags,
        )
        router = StartedRouter(server, self._addresses, self._http, self._run, nowhere)
        await router.start(urls, self._cluster.start_timeout_s)
        return router

    async def _run(self, server: Server, command: Command, wait: Callable[[], Awaitable[None]]) -> None:
        """Start a server and return once it is ready."""
        await self._start(server, command)
        await self._ready(server, wait())

    def _server(self, name: str, create: Callable[[], Any]) -> Server:
        timeout_s, kill = self._failures.control_timeout_s, self._placement.kill
        self._servers.append(Server(name=name, actor=create(), timeout_s=timeout_s, create=create, kill=kill))
        return self._servers[-1]

    async def _start(self, server: Server, command: Command) -> None:
        log = self._deployment.logs / f"{server.name}.log"
        call = server.actor.start.remote(server.name, command.arguments, command.environment, log, command.key)
        await answered(call, f"starting {server.name}", self._cluster.start_timeout_s, ServerFailed)

    async def _ready(self, server: Server, waiting: Awaitable[None]) -> None:
        """Wait until the server is ready.  Raises ServerFailed if it ends, or is not ready in time."""
        try:
            with plainly():
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(server.watch(), name=f"watch-{server.name}")
                    await waiting
                    watch.cancel()
        except EngineTimeout as error:
            raise ServerFailed(f"{server.name}: {error} (start-timeout-s)") from error
        except ForeignServer as error:
            raise ForeignServer(f"{server.name}: {error}") from error

    # ---- trainer and weights

    async def _load(self, ranks: tuple[Any, ...]) -> None:
        settings, size, origin = self._deployment.trainer, self._cluster.num_trainer_ranks, self._deployment.origin
        address, port = await self._addresses.rank(ranks[0])
        layers = await self._every(
            ranks, "start", lambda actor, rank: actor.start.remote(settings, rank, size, address, port)
        )
        logger.info("the trainer's layers: %s (--transformer-impl)", layers[0])
        trainer, timeout_s = self._trainer(ranks), self._cluster.start_timeout_s
        if settings.train.check_fast_step:
            for line in await trainer.check_fast_step(timeout_s=timeout_s):
                logger.info("%s", line)
        if origin is not None:
            await trainer.load(origin, timeout_s=timeout_s)

    def _trainer(self, ranks: tuple[Any, ...]) -> RayTrainer:
        failures = self._failures
        return RayTrainer(ranks, train_timeout_s=failures.train_timeout_s, control_timeout_s=failures.control_timeout_s)

    async def _every(self, ranks: Sequence[Any], what: str, ask: Callable[[Any, int], Any]) -> list[Any]:
        """Ask all ranks at once and return their answers."""
        timeout_s = self._cluster.start_timeout_s
        calls = [
            answered(ask(actor, rank), f"trainer rank {rank}, {what}", timeout_s) for rank, actor in enumerate(ranks)
        ]
        return await together(calls)

    def _control(self, url: str) -> EngineControl:
        timeout_s, num_ranks = self._failures.control_timeout_s, self._deployment.ranks_per_engine
        return EngineControl(self._http, url, timeout_s=timeout_s, num_ranks=num_ranks)

    async def _updater(
        self,
        engines: tuple[EngineControl, ...],
        membership: EngineMembership[EngineControl],
        trainer: RayTrainer,
        first_rank: Any,
    ) -> WeightUpdater:
        if self._cluster.colocate:
            return await self._sharing(engines, trainer)
        if self._deployment.disk is not None:
            return await self._writing(membership, trainer, self._deployment.disk)
        return await self._broadcasting(membership, trainer, first_rank)

    async def _sharing(self, engines: tuple[EngineControl, ...], trainer: RayTrainer) -> TensorUpdater:
        updater = TensorUpdater(
            engines,
            trainer,
            ranks_per_engine=self._cluster.rollout_num_gpus_per_engine,
            timeout_s=self._failures.control_timeout_s,
        )
        await updater.connect()
        return updater

    async def _broadcasting(
        self, membership: EngineMembership[EngineControl], trainer: RayTrainer, first_rank: Any
    ) -> BroadcastUpdater:
        deployment = self._deployment
        address, _ = await self._addresses.rank(first_rank)

        async def find_port() -> int:
            _, port = await self._addresses.rank(first_rank)
            return port

        updater = BroadcastUpdater(
            membership,
            trainer,
            master_address=address,
            find_port=find_port,
            backend="nccl" if deployment.trainer.device == "cuda" else "gloo",
            timeout_s=self._failures.control_timeout_s,
            pause_mode=deployment.pause_mode,
            is_checked=deployment.trainer.train.check_weight_updates,
        )
        await updater.connect()
        return updater

    async def _writing(
        self, membership: EngineMembership[EngineControl], trainer: RayTrainer, folder: Path
    ) -> DiskUpdater:
        updater = DiskUpdater(
            membership,
            trainer,
            folder=folder,
            timeout_s=self._failures.control_timeout_s,
            pause_mode=self._deployment.pause_mode,
            silence_s=self._failures.request_timeout_s,
        )
        self._at_the_end.push_async_callback(updater.close)
        await updater.connect()
        return updater
