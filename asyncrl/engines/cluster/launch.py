"""Places and starts everything that a run needs: engines, router, trainer ranks, and the group that weights go through.

placement ──▶ engines (SGLang) ──▶ router ─┐
         └──▶ trainer ranks (Megatron) ────┴──▶ weight-update group
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

from asyncrl.engines.cluster.actors import RankActor, ServerActor
from asyncrl.engines.cluster.trainer import RayTrainer, answered, together
from asyncrl.engines.megatron.settings import TrainerSettings
from asyncrl.engines.sglang.client import SGLangEngine
from asyncrl.engines.sglang.control import EngineControl, wait_for_router, wait_for_server
from asyncrl.engines.sglang.http import Wire
from asyncrl.engines.sglang.launch import Command, RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.engines.weights import BroadcastUpdater
from asyncrl.errors import AsyncRLError, ServerFailed

CHECK_PERIOD_S = 2.0
"""Between two looks at whether a server still lives: soon enough to name it before its requests run out of retries."""
STOP_TIMEOUT_S = 6.0
"""For all servers to end when the run does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What to start."""

    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    model_path: Path
    seed: int
    num_ranks: int
    num_engines: int
    gpus_per_engine: int
    use_router: bool
    trainer: TrainerSettings
    server_flags: Mapping[str, str | bool] = field(default_factory=dict)
    router_flags: Mapping[str, str | bool] = field(default_factory=dict)
    logs: Path
    """Folder for the servers' output."""
    start_timeout_s: float
    request_timeout_s: float
    control_timeout_s: float
    train_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What was started and is ready."""

    engine: SGLangEngine
    trainer: RayTrainer
    updater: BroadcastUpdater
    servers: tuple[Any, ...]

    async def watch(self) -> NoReturn:
        """Raises ServerFailed once a server has ended; runs until cancelled otherwise."""
        while True:
            for server in self.servers:
                await answered(server.check.remote(), "the actor of a server", STOP_TIMEOUT_S)
            await asyncio.sleep(CHECK_PERIOD_S)


def pick_device(ray: ModuleType, wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device to run on: GPUs where the cluster has some, unless told otherwise."""
    if wanted == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return wanted


@contextlib.asynccontextmanager
async def deployed(ray: ModuleType, deployment: Deployment, phase: Callable[[str], None]) -> AsyncIterator[Running]:
    """Start everything and wait until it is ready; stop the servers afterwards, however the body ends.

    ``phase`` is told what is being waited for.  Raises ServerFailed, TrainerFailed or WeightUpdateFailed.
    """
    async with contextlib.AsyncExitStack() as stack:
        wire = await stack.enter_async_context(Wire())
        builder = _Builder(ray, deployment, wire, phase)
        stack.push_async_callback(builder.stop)
        yield await builder.build()


class _Builder:
    """Starts one deployment; remembers what it started."""

    def __init__(self, ray: ModuleType, deployment: Deployment, wire: Wire, phase: Callable[[str], None]) -> None:
        self._ray = ray
        self._deployment = deployment
        self._wire = wire
        self._phase = phase
        self._servers: list[Any] = []

    async def build(self) -> Running:
        """Start it all; engines and ranks load at the same time."""
        deployment = self._deployment
        self._phase("placing trainer and engines")
        group = await self._placement()
        self._phase(f"loading the model: {deployment.num_engines} SGLang, {deployment.num_ranks} Megatron")
        try:
            async with asyncio.timeout(deployment.start_timeout_s):
                (urls, router_url), ranks = await together([self._engines(group), self._ranks(group)])
        except TimeoutError as error:
            raise ServerFailed(f"not ready within {deployment.start_timeout_s:g} s (start-timeout-s)") from error
        trainer = RayTrainer(
            ranks, train_timeout_s=deployment.train_timeout_s, control_timeout_s=deployment.control_timeout_s
        )
        self._phase("connecting trainer and engines")
        return Running(
            engine=SGLangEngine(
                self._wire, urls, router_url=router_url, request_timeout_s=deployment.request_timeout_s
            ),
            trainer=trainer,
            updater=await self._updater(urls, trainer, ranks[0]),
            servers=tuple(self._servers),
        )

    async def stop(self) -> None:
        """End every server.  Never raises: whatever is left dies with its actor."""
        with contextlib.suppress(AsyncRLError):
            await together([answered(server.stop.remote(), "stop", STOP_TIMEOUT_S) for server in self._servers])

    # ---- placement

    async def _placement(self) -> Any:
        """Room for every rank and engine, ranks first; engines and ranks never share a GPU."""
        deployment = self._deployment
        bundles = [self._resources(1)] * deployment.num_ranks
        bundles += [self._resources(deployment.gpus_per_engine)] * deployment.num_engines
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        try:
            await answered(group.ready(), "placement", min(60.0, deployment.start_timeout_s))
        except AsyncRLError as error:
            raise ServerFailed(f"the run needs {_sum(bundles)}, the cluster offers {self._offer()}") from error
        return group

    def _resources(self, gpus: int) -> dict[str, float]:
        return {"CPU": 1, "GPU": gpus} if self._deployment.device == "cuda" else {"CPU": 1}

    def _offer(self) -> str:
        total = self._ray.cluster_resources()
        return f"{total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs"

    def _actor(self, kind: type, group: Any | None, bundle: int) -> Any:
        if group is None:
            return self._ray.remote(kind).options(num_cpus=0).remote()
        bundle_resources = group.bundle_specs[bundle]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        options = {
            "num_cpus": bundle_resources["CPU"],
            "num_gpus": bundle_resources.get("GPU", 0),
            "scheduling_strategy": strategy,
        }
        return self._ray.remote(kind).options(**options).remote()

    # ---- engines and router

    async def _engines(self, group: Any) -> tuple[tuple[str, ...], str | None]:
        """URLs of the engines, and of the router if there is one; all of them ready."""
        deployment = self._deployment
        urls = await together([self._engine(group, number) for number in range(deployment.num_engines)])
        router_url = await self._router(tuple(urls)) if deployment.use_router else None
        return tuple(urls), router_url

    async def _engine(self, group: Any, number: int) -> str:
        deployment = self._deployment
        server = self._actor(ServerActor, group, deployment.num_ranks + number)
        self._servers.append(server)
        host, (port,) = await self._place(server, 1)
        launch = ServerLaunch(
            model_path=deployment.model_path,
            host=host,
            port=port,
            device=deployment.device,
            dtype=deployment.dtype,
            seed=deployment.seed,
            tensor_parallel=deployment.gpus_per_engine if deployment.device == "cuda" else 1,
            flags=deployment.server_flags,
        )
        url = f"http://{host}:{port}"
        await self._start(server, f"sglang-{number}", server_command(launch))
        await self._ready(server, wait_for_server(self._wire, url, deployment.start_timeout_s))
        return url

    async def _router(self, urls: tuple[str, ...]) -> str:
        deployment = self._deployment
        server = self._actor(ServerActor, None, 0)
        self._servers.append(server)
        host, (port, prometheus_port) = await self._place(server, 2)
        launch = RouterLaunch(
            worker_urls=urls, host=host, port=port, prometheus_port=prometheus_port, flags=deployment.router_flags
        )
        url = f"http://{host}:{port}"
        await self._start(server, "router", router_command(launch))
        await self._ready(server, wait_for_router(self._wire, url, urls, deployment.start_timeout_s))
        return url

    async def _start(self, server: Any, name: str, command: Command) -> None:
        log = self._deployment.logs / f"{name}.log"
        call = server.start.remote(name, command.arguments, command.environment, log)
        await answered(call, name, self._deployment.start_timeout_s)

    async def _ready(self, server: Any, waiting: Any) -> None:
        """Wait until the server is ready, or has ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(server))
                await waiting
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _watch(self, server: Any) -> NoReturn:
        while True:
            await answered(server.check.remote(), "the actor of a server", self._deployment.start_timeout_s)
            await asyncio.sleep(CHECK_PERIOD_S)

    async def _place(self, actor: Any, num_ports: int) -> tuple[str, tuple[int, ...]]:
        """Where an actor can be reached: on one node, through the loopback interface alone."""
        timeout_s = self._deployment.start_timeout_s
        ports = await answered(actor.free_ports.remote(num_ports), "an actor's ports", timeout_s)
        if len(self._ray.nodes()) == 1:
            return "127.0.0.1", ports
        return await answered(actor.address.remote(), "an actor's address", timeout_s), ports

    # ---- trainer and weights

    async def _ranks(self, group: Any) -> tuple[Any, ...]:
        deployment = self._deployment
        ranks = tuple(self._actor(RankActor, group, rank) for rank in range(deployment.num_ranks))
        address, (port,) = await self._place(ranks[0], 1)
        await together(
            [
                answered(
                    actor.start.remote(deployment.trainer, rank, deployment.num_ranks, address, port),
                    f"trainer rank {rank}, start",
                    deployment.start_timeout_s,
                )
                for rank, actor in enumerate(ranks)
            ]
        )
        return ranks

    async def _updater(self, urls: tuple[str, ...], trainer: RayTrainer, first_rank: Any) -> BroadcastUpdater:
        deployment = self._deployment
        address, (port,) = await self._place(first_rank, 1)
        num_ranks = deployment.gpus_per_engine if deployment.device == "cuda" else 1
        updater = BroadcastUpdater(
            tuple(
                EngineControl(self._wire, url, timeout_s=deployment.control_timeout_s, num_ranks=num_ranks)
                for url in urls
            ),
            trainer,
            master_address=address,
            master_port=port,
            backend="nccl" if deployment.device == "cuda" else "gloo",
            timeout_s=deployment.control_timeout_s,
        )
        await updater.connect()
        return updater


def _sum(bundles: list[dict[str, float]]) -> str:
    cpus, gpus = (sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU"))
    return f"{cpus:g} CPUs and {gpus:g} GPUs"
