"""Placement and start of everything that a run needs: engines, router, trainer ranks, and the weight-update group.

placement ──▶ engines (SGLang) ──▶ router ─┐
         └──▶ trainer ranks (Megatron) ────┴──▶ weight-update group

On shared GPUs the ranks load last: after the engines have loaded, measured the free memory, and released theirs.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, cast

from asyncrl.config.derived import max_engine_restarts
from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.calls import together
from asyncrl.engines.cluster.placement import Placement, reserve
from asyncrl.engines.cluster.ray_trainer import RayTrainer
from asyncrl.engines.cluster.router import RouterSupervisor, StartedRouter
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.cluster.servers import Servers
from asyncrl.engines.cluster.settings import Deployment
from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.cluster.trainer_ranks import TrainerRanks
from asyncrl.engines.gpu_sharing import SharedGpus, release_engines
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.loads import EngineLoads
from asyncrl.engines.sglang.installed_plugins import EnginePlugins
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.cuda_ipc import TensorUpdater
from asyncrl.engines.weight_sync.disk import DiskUpdater
from asyncrl.engines.weight_sync.kept_weights import KeptWeights
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import (
    GpuSharingFailed,
    ServerFailed,
    UpdateInterrupted,
)
from asyncrl.event_loop import Deadline
from asyncrl.protocols import GpuSharing, WeightUpdater
from asyncrl.types import Weights

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds for a server whose connections are closed to be found dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A deployment that is ready."""

    engine: SGLangEngine
    key: str = field(repr=False)
    """The key that engines and router want with every request."""
    trainer: RayTrainer
    ranks: TrainerRanks
    updater: WeightUpdater
    load_probe: EngineLoads
    supervisor: EngineSupervisor
    router: RouterSupervisor | None = None
    """None without a router."""
    release_resources: Callable[[], None]
    """Ends the ranks, for another deployment in the same session; a run leaves this to Ray's shutdown."""
    has_trainer: bool = True
    """False: the engines keep the weights with which they started."""
    gpu_sharing: GpuSharing | None = None
    """The time-sharing of the GPUs, which the trainer holds first; None if trainer and engines have separate GPUs."""
    plugins: Mapping[str, EnginePlugins | None] = field(default_factory=dict)
    """Our plug-ins in each engine, by the engine's name; None if the engine did not answer."""

    @property
    def url(self) -> str:
        """The present URL of the router; of the first engine without a router."""
        return self.supervisor.engines[0].url if self.router is None else self.router.router.url

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


@contextlib.asynccontextmanager
async def deployed_trainer(
    ray: ModuleType, deployment: Deployment, phase: Callable[[str], None]
) -> AsyncIterator[RayTrainer]:
    """Start the trainer alone, without engines, and wait until it is ready.

    ``phase`` is called with a description of each phase.  Raises ConfigError, ServerFailed or TrainerFailed.
    """
    async with HttpClient(deployment.key) as http:
        phase("placing the trainer")
        layout = replace(deployment.layout, num_engines=0, is_shared=False)
        placement = await reserve(ray, layout, deployment.cluster.start_timeout_s)
        yield await _Builder(placement, deployment, http, phase).build_trainer()


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
        self._servers = Servers(placement, deployment, http, self._addresses)
        self._ranks = TrainerRanks(placement, deployment, self._addresses)
        self._at_the_end = contextlib.AsyncExitStack()

    async def build(self) -> Running:
        """Start engines, router and ranks, and connect them."""
        cluster, failures, num_ranks = self._cluster, self._failures, self._deployment.layout.num_ranks
        trains = f", {num_ranks} Megatron" if num_ranks else ", no trainer"
        self._phase(f"loading the model: {cluster.num_engines} SGLang{trains}")
        try:
            async with Deadline(cluster.start_timeout_s):
                engines, router = await self._loaded()
        except TimeoutError as error:
            raise ServerFailed(f"not ready within {cluster.start_timeout_s:g} s (start-timeout-s)") from error
        trainer = self._ranks.trainer
        urls = tuple(engine.url for engine in engines)
        self._phase("connecting trainer and engines")
        engine = SGLangEngine(
            self._http,
            urls,
            router_url=None if router is None else router.url,
            request_timeout_s=failures.request_timeout_s,
            routes=self._deployment.routes,
        )
        controls = tuple(self._servers.control(url) for url in urls)
        membership = EngineMembership[EngineControl](controls)
        return Running(
            engine=engine,
            key=self._deployment.key,
            trainer=trainer,
            ranks=self._ranks,
            updater=await self._updater(controls, membership, trainer),
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
            has_trainer=len(self._ranks) > 0,
            release_resources=self._placement.release_resources,
            gpu_sharing=SharedGpus(controls, trainer, holder="trainer", timeout_s=failures.control_timeout_s)
            if cluster.colocate
            else None,
            plugins=self._servers.plugins,
        )

    async def build_trainer(self) -> RayTrainer:
        """Start the ranks alone."""
        cluster = self._cluster
        self._phase(f"loading the model: {cluster.num_trainer_ranks} Megatron")
        self._ranks.create()
        try:
            async with Deadline(cluster.start_timeout_s):
                await self._ranks.load(self._deployment.origin)
        except TimeoutError as error:
            raise ServerFailed(f"not ready within {cluster.start_timeout_s:g} s (start-timeout-s)") from error
        return self._ranks.trainer

    async def _loaded(self) -> tuple[tuple[StartedEngine, ...], StartedRouter | None]:
        """Load engines and ranks; return the engines and the router.

        They load at the same time, except on shared GPUs, where the ranks load after the engines.
        """
        self._ranks.create()
        origin = self._deployment.origin
        if not len(self._ranks):
            return await self._servers.start([])
        if not self._cluster.colocate:
            started, _ = await together([self._servers.start([]), self._ranks.load(origin)])
            return cast(tuple[tuple[StartedEngine, ...], StartedRouter | None], started)
        engines, router = await self._servers.start(await self._ranks.gpus())
        try:
            await release_engines(
                [self._servers.control(engine.url) for engine in engines], self._failures.control_timeout_s
            )
        except GpuSharingFailed:
            await _look_for_the_dead(self._servers.all)
            raise
        await self._ranks.load(origin)
        return engines, router

    async def stop(self) -> None:
        """End every server, and remove the folder of weights, if there is one."""
        async with self._at_the_end:
            await self._servers.stop()

    # ---- weights

    async def _updater(
        self,
        engines: tuple[EngineControl, ...],
        membership: EngineMembership[EngineControl],
        trainer: RayTrainer,
    ) -> WeightUpdater:
        if not len(self._ranks):
            return KeptWeights(membership)
        if self._cluster.colocate:
            return await self._sharing(engines, trainer)
        if self._deployment.disk is not None:
            return await self._writing(membership, trainer, self._deployment.disk)
        return await self._broadcasting(membership, trainer)

    async def _sharing(self, engines: tuple[EngineControl, ...], trainer: RayTrainer) -> TensorUpdater:
        updater = TensorUpdater(
            engines,
            trainer,
            ranks_per_engine=self._cluster.rollout_num_gpus_per_engine,
            timeout_s=self._failures.control_timeout_s,
        )
        await updater.connect()
        return updater

    async def _broadcasting(self, membership: EngineMembership[EngineControl], trainer: RayTrainer) -> BroadcastUpdater:
        deployment = self._deployment
        address, _ = await self._ranks.address()

        async def find_port() -> int:
            _, port = await self._ranks.address()
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
