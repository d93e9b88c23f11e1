"""Places and starts everything that a run needs: engines, router, trainer ranks, and the group that weights go through.

placement ──▶ engines (SGLang) ──▶ router ─┐
         └──▶ trainer ranks (Megatron) ────┴──▶ weight-update group

Where they share GPUs, ranks load when the engines have loaded, measured the memory that there is, and given it back.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.gpu_sharing import SharedGpus, give_back
from asyncrl.engines.megatron.checkpoint.directory import Origin
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.sglang.client.control import EngineControl, wait_for_router
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.loads import EngineLoads
from asyncrl.engines.sglang.installed_plugins import EnginePlugins, Plugin, missing_warning, start_hint
from asyncrl.engines.sglang.launch import Command, RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.cuda_ipc import TensorUpdater
from asyncrl.engines.weight_sync.disk import DiskUpdater
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.round import PauseMode
from asyncrl.errors import EngineError, EngineTimeout, GpuSharingFailed, ServerFailed, UpdateInterrupted, plainly
from asyncrl.protocols import GpuSharing, WeightUpdater
from asyncrl.types import Weights

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""For a server whose connections are closed to be seen dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What to start."""

    cluster: ClusterConfig
    """How many of everything; its ``device`` is settled in ``trainer``."""
    failures: FailureConfig
    trainer: TrainerSettings
    """Engines serve its model, on the same kind of device and in the same dtype."""
    server_flags: Mapping[str, str | bool] = field(default_factory=dict)
    router_flags: Mapping[str, str | bool] = field(default_factory=dict)
    logs: Path
    """Folder for the servers' output."""
    origin: Origin | None = None
    """The trainer's first weights, when not those of the model's folder."""
    pause_mode: PauseMode = "in_place"
    """What an update does to requests in flight."""
    disk: Path | None = None
    """Folder that is not there yet, through which weights go to the engines; None: they are broadcast."""

    @property
    def ranks_per_engine(self) -> int:
        """The tensor parallel size of an engine, which on a CPU is one process."""
        return self.cluster.rollout_num_gpus_per_engine if self.trainer.device == "cuda" else 1

    @property
    def needed_plugins(self) -> tuple[Plugin, ...]:
        """Our plug-ins inside SGLang that this run uses."""
        if self.cluster.colocate:
            return ("stamps", "memory_saver") if self.trainer.device == "cuda" else ("stamps",)
        return ("stamps", "direct") if self.disk is None else ("stamps",)

    @property
    def layout(self) -> Layout:
        """Who is to be placed."""
        return Layout(
            device=self.trainer.device,
            num_ranks=self.cluster.num_trainer_ranks,
            num_engines=self.cluster.num_engines,
            gpus_per_engine=self.cluster.rollout_num_gpus_per_engine,
            is_shared=self.cluster.colocate,
            tensor_parallel=self.trainer.parallel.tensor_model_parallel_size,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What was started and is ready."""

    engine: SGLangEngine
    trainer: RayTrainer
    updater: WeightUpdater
    load_probe: EngineLoads
    servers: tuple[Server, ...]
    supervisor: EngineSupervisor
    give_up: Callable[[], None]
    """End the ranks, for another deployment in the same session; a run leaves that to Ray's end."""
    gpu_sharing: GpuSharing | None = None
    """On shared GPUs; the trainer's turn comes first."""
    plugins: Mapping[str, EnginePlugins | None] = field(default_factory=dict)
    """Ours in each engine, by the engine's name; None where one did not say."""

    async def serve(self, weights: Weights) -> None:
        """Have all engines, which have no requests, serve the trainer's present weights as ``weights``.

        Raises WeightUpdateFailed or GpuSharingFailed.
        """
        if self.gpu_sharing is not None:
            await self.gpu_sharing.acquire_for_training()
            await self.gpu_sharing.acquire_for_update()
        await self._update(weights)
        if self.gpu_sharing is not None:
            await self.gpu_sharing.acquire_for_generation()

    async def _update(self, weights: Weights) -> None:
        """From the beginning, when an engine is lost meanwhile."""
        while True:
            try:
                await self.updater.snapshot()
                await self.updater.publish(weights)
            except UpdateInterrupted as error:
                logger.warning("the weight update begins anew: %s", error)
            else:
                return

    async def look_for_the_dead(self) -> None:
        """Raises ServerFailed if a server has ended, or is about to."""
        await _look_for_the_dead(self.servers)

    async def watch(self) -> None:
        """Start engines again that end.  Raises ServerFailed when too many did, or the router; runs until cancelled."""
        engines = [engine.server for engine in self.supervisor.engines]
        others = [server.watch() for server in self.servers if server not in engines]
        await together([*others, self.supervisor.keep()])


def pick_device(ray: ModuleType, wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device to run on: GPUs where the cluster has some, unless told otherwise."""
    if wanted == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return wanted


async def _look_for_the_dead(servers: Sequence[Server]) -> None:
    """A process that is killed closes its connections some time before it can be seen dead.  Raises ServerFailed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOK_S):
            await together([server.watch() for server in servers])


@contextlib.asynccontextmanager
async def deployed(ray: ModuleType, deployment: Deployment, phase: Callable[[str], None]) -> AsyncIterator[Running]:
    """Start everything and wait until it is ready; stop the servers afterwards, however the body ends.

    ``phase`` is told what is being waited for.  Raises ConfigError, ServerFailed, TrainerFailed, GpuSharingFailed or
    WeightUpdateFailed.
    """
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(HttpClient())
        phase("placing trainer and engines")
        placement = await reserve(ray, deployment.layout, deployment.cluster.start_timeout_s)
        builder = _Builder(placement, deployment, http, phase)
        stack.push_async_callback(builder.stop)
        yield await builder.build()


class _Builder:
    """Starts one deployment in the room reserved for it; remembers what it started."""

    def __init__(
        self, placement: Placement, deployment: Deployment, http: HttpClient, phase: Callable[[str], None]
    ) -> None:
        self._placement = placement
        self._deployment = deployment
        self._cluster = deployment.cluster
        self._failures = deployment.failures
        self._addresses = Addresses(
            self._cluster.num_engines,
            is_single_node=placement.is_single_node,
            timeout_s=self._cluster.start_timeout_s,
        )
        self._http = http
        self._phase = phase
        self._servers: list[Server] = []
        self._plugins: dict[str, EnginePlugins | None] = {}
        self._at_the_end = contextlib.AsyncExitStack()

    async def build(self) -> Running:
        """Start it all; engines and ranks load at the same time."""
        cluster, failures = self._cluster, self._failures
        self._phase(f"loading the model: {cluster.num_engines} SGLang, {cluster.num_trainer_ranks} Megatron")
        try:
            async with asyncio.timeout(cluster.start_timeout_s):
                engines, router_url, ranks = await self._loaded()
        except TimeoutError as error:
            raise ServerFailed(f"not ready within {cluster.start_timeout_s:g} s (start-timeout-s)") from error
        trainer = self._trainer(ranks)
        urls = tuple(engine.url for engine in engines)
        self._phase("connecting trainer and engines")
        engine = SGLangEngine(self._http, urls, router_url=router_url, request_timeout_s=failures.request_timeout_s)
        controls = tuple(self._control(url) for url in urls)
        membership = EngineMembership[EngineControl](controls)
        return Running(
            engine=engine,
            trainer=trainer,
            updater=await self._updater(controls, membership, trainer, ranks[0]),
            load_probe=EngineLoads(self._http, urls),
            servers=tuple(self._servers),
            supervisor=EngineSupervisor(
                engines, membership, engine, max_restarts=max_engine_restarts(failures, cluster)
            ),
            give_up=self._placement.give_up,
            gpu_sharing=SharedGpus(controls, trainer, holder="trainer", timeout_s=failures.control_timeout_s)
            if cluster.colocate
            else None,
            plugins=self._plugins,
        )

    async def _loaded(self) -> tuple[tuple[StartedEngine, ...], str | None, tuple[Any, ...]]:
        """Engines, the router's URL, and ranks: all at the same time, or on shared GPUs one after the other."""
        ranks = tuple(self._placement.rank(RankActor, rank) for rank in range(self._cluster.num_trainer_ranks))
        if not self._cluster.colocate:
            (engines, router_url), _ = await together([self._engines([]), self._load(ranks)])
            return engines, router_url, ranks
        gpus = await self._every(ranks, "GPUs", lambda actor, _: actor.gpus.remote())
        engines, router_url = await self._engines(gpus)
        try:
            await give_back([self._control(engine.url) for engine in engines], self._failures.control_timeout_s)
        except GpuSharingFailed:
            await _look_for_the_dead(self._servers)
            raise
        await self._load(ranks)
        return engines, router_url, ranks

    async def stop(self) -> None:
        """End every server, and remove what was for them."""
        async with self._at_the_end:
            await together([server.stop() for server in self._servers])

    # ---- engines and router

    async def _engines(self, gpus: Sequence[Sequence[str]]) -> tuple[tuple[StartedEngine, ...], str | None]:
        """The engines, and the URL of the router if there is one; all of them ready.

        ``gpus`` are those of each rank, where engines share them.
        """
        cluster = self._cluster
        # Now, for its process takes seconds to start; the router itself would ask in vain for engines that load.
        router = self._server("router", self._placement.anywhere(ServerActor)) if cluster.use_router else None
        engines = await together([self._engine(number, gpus) for number in range(cluster.num_engines)])
        said = {name: each for name, each in self._plugins.items() if each is not None}
        if warning := missing_warning(said, self._deployment.needed_plugins):
            logger.warning("%s", warning)
        urls = tuple(engine.url for engine in engines)
        return tuple(engines), await self._route(router, urls) if router else None

    async def _engine(self, number: int, gpus: Sequence[Sequence[str]]) -> StartedEngine:
        deployment, trainer, cluster = self._deployment, self._deployment.trainer, self._cluster
        each = cluster.rollout_num_gpus_per_engine
        server = self._server(f"sglang-{number}", self._placement.engine(ServerActor, number))
        host, port, nccl_port = await self._addresses.engine(server.actor, number)
        launch = ServerLaunch(
            model_path=trainer.model.hf_checkpoint,
            host=host,
            port=port,
            nccl_port=nccl_port,
            device=trainer.device,
            dtype=trainer.dtype,
            seed=trainer.model.seed,
            tensor_parallel=deployment.ranks_per_engine,
            flags=deployment.server_flags,
            shared_gpus=tuple(chain.from_iterable(gpus[number * each : (number + 1) * each]))
            if cluster.colocate
            else None,
        )
        url = f"http://{host}:{port}"

        async def start() -> None:
            await self._start(server, server_command(launch))
            await self._ready(server, self._control(url).get_ready(cluster.start_timeout_s))

        await self._first_start(start)
        self._plugins[server.name] = await self._plugins_of(server, self._control(url))
        probe = partial(self._control(url).probe, self._failures.request_timeout_s)
        return StartedEngine(url=url, server=server, start=start, probe=probe)

    async def _first_start(self, start: Callable[[], Awaitable[None]]) -> None:
        """Raises ServerFailed, which says so where an engine that gives its memory back lacks its plug-in for that."""
        try:
            await start()
        except ServerFailed as error:
            if "memory_saver" in self._deployment.needed_plugins and (hint := start_hint("memory_saver")):
                raise ServerFailed(f"{error}; --colocate: {hint}") from error
            raise

    async def _plugins_of(self, server: Server, control: EngineControl) -> EnginePlugins | None:
        try:
            return await control.plugins()
        except EngineError as error:  # who watches the server says why, if it has ended
            logger.warning("%s did not say which plug-ins of asyncrl it has: %s", server.name, error)
            return None

    async def _route(self, server: Server, urls: tuple[str, ...]) -> str:
        host, port, prometheus_port = await self._addresses.router(server.actor)
        launch = RouterLaunch(
            worker_urls=urls, host=host, port=port, prometheus_port=prometheus_port, flags=self._deployment.router_flags
        )
        url = f"http://{host}:{port}"
        await self._start(server, router_command(launch))
        await self._ready(server, wait_for_router(self._http, url, urls, self._cluster.start_timeout_s))
        return url

    def _server(self, name: str, actor: Any) -> Server:
        self._servers.append(Server(name=name, actor=actor, timeout_s=self._failures.control_timeout_s))
        return self._servers[-1]

    async def _start(self, server: Server, command: Command) -> None:
        log = self._deployment.logs / f"{server.name}.log"
        call = server.actor.start.remote(server.name, command.arguments, command.environment, log)
        await answered(call, f"starting {server.name}", self._cluster.start_timeout_s, ServerFailed)

    async def _ready(self, server: Server, waiting: Awaitable[None]) -> None:
        """Wait until the server is ready.  Raises ServerFailed when it has ended, or is not in time."""
        try:
            with plainly():
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(server.watch(), name=f"watch-{server.name}")
                    await waiting
                    watch.cancel()
        except EngineTimeout as error:
            raise ServerFailed(f"{server.name}: {error} (start-timeout-s)") from error

    # ---- trainer and weights

    async def _load(self, ranks: tuple[Any, ...]) -> None:
        settings, size, origin = self._deployment.trainer, self._cluster.num_trainer_ranks, self._deployment.origin
        address, port = await self._addresses.rank(ranks[0])
        layers = await self._every(
            ranks, "start", lambda actor, rank: actor.start.remote(settings, rank, size, address, port)
        )
        logger.info("the trainer's layers: %s (--transformer-impl)", layers[0])
        if origin is not None:
            await self._trainer(ranks).load(origin, timeout_s=self._cluster.start_timeout_s)

    def _trainer(self, ranks: tuple[Any, ...]) -> RayTrainer:
        failures = self._failures
        return RayTrainer(ranks, train_timeout_s=failures.train_timeout_s, control_timeout_s=failures.control_timeout_s)

    async def _every(self, ranks: Sequence[Any], what: str, ask: Callable[[Any, int], Any]) -> list[Any]:
        """The answers of all ranks, asked at once."""
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
