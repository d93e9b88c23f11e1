"""Places and starts everything that a run needs: engines, router, trainer ranks, and the group that weights go through.

placement ──▶ engines (SGLang) ──▶ router ─┐
         └──▶ trainer ranks (Megatron) ────┴──▶ weight-update group
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from asyncrl.engines.checkpoints import Origin
from asyncrl.engines.cluster.actors import RankActor, ServerActor
from asyncrl.engines.cluster.calls import answered, together
from asyncrl.engines.cluster.keeper import EngineKeeper, StartedEngine
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.cluster.trainer import RayTrainer
from asyncrl.engines.megatron.settings import TrainerSettings
from asyncrl.engines.roster import Roster
from asyncrl.engines.sglang.client import SGLangEngine
from asyncrl.engines.sglang.control import EngineControl, wait_for_router, wait_for_server
from asyncrl.engines.sglang.http import Wire
from asyncrl.engines.sglang.launch import Command, RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.engines.sglang.loads import EngineLoads
from asyncrl.engines.weights import BroadcastUpdater, PauseMode, WeightReceiver
from asyncrl.errors import ConfigError, EngineTimeout, ServerFailed, plainly

LOOK_S = 3.0
"""For a server whose connections are closed to be seen dead."""


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
    origin: Origin | None = None
    """Of the trainer's first weights, when not ``model_path``."""
    pause_mode: PauseMode = "in_place"
    """What an update does to requests in flight."""
    max_engine_restarts: int = 0
    """Of all engines together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What was started and is ready."""

    engine: SGLangEngine
    trainer: RayTrainer
    updater: BroadcastUpdater
    load_probe: EngineLoads
    servers: tuple[Server, ...]
    keeper: EngineKeeper

    async def look_for_the_dead(self) -> None:
        """Raises ServerFailed if a server has ended, or is about to.

        A process that is killed closes its connections some time before it can be seen dead.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await together([server.watch() for server in self.servers])

    async def watch(self) -> None:
        """Start engines again that end.  Raises ServerFailed when too many did, or the router; runs until cancelled."""
        engines = [engine.server for engine in self.keeper.engines]
        others = [server.watch() for server in self.servers if server not in engines]
        await together([*others, self.keeper.keep()])


def pick_device(ray: ModuleType, wanted: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """The device to run on: GPUs where the cluster has some, unless told otherwise."""
    if wanted == "auto":
        return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"
    return wanted


@contextlib.asynccontextmanager
async def deployed(ray: ModuleType, deployment: Deployment, phase: Callable[[str], None]) -> AsyncIterator[Running]:
    """Start everything and wait until it is ready; stop the servers afterwards, however the body ends.

    ``phase`` is told what is being waited for.  Raises ConfigError, ServerFailed, TrainerFailed or WeightUpdateFailed.
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
        self._servers: list[Server] = []
        self._single_node = True

    async def build(self) -> Running:
        """Start it all; engines and ranks load at the same time."""
        deployment = self._deployment
        self._phase("placing trainer and engines")
        group = await self._placement()
        self._phase(f"loading the model: {deployment.num_engines} SGLang, {deployment.num_ranks} Megatron")
        try:
            async with asyncio.timeout(deployment.start_timeout_s):
                (engines, router_url), ranks = await together([self._engines(group), self._ranks(group)])
        except EngineTimeout as error:
            raise ServerFailed(f"{error} (start-timeout-s)") from error
        except TimeoutError as error:
            raise ServerFailed(f"not ready within {deployment.start_timeout_s:g} s (start-timeout-s)") from error
        trainer = RayTrainer(
            ranks, train_timeout_s=deployment.train_timeout_s, control_timeout_s=deployment.control_timeout_s
        )
        urls = tuple(engine.url for engine in engines)
        self._phase("connecting trainer and engines")
        engine = SGLangEngine(self._wire, urls, router_url=router_url, request_timeout_s=deployment.request_timeout_s)
        roster = Roster[WeightReceiver](self._control(url) for url in urls)
        return Running(
            engine=engine,
            trainer=trainer,
            updater=await self._updater(roster, trainer, ranks[0]),
            load_probe=EngineLoads(self._wire, urls),
            servers=tuple(self._servers),
            keeper=EngineKeeper(engines, roster, engine, max_restarts=deployment.max_engine_restarts),
        )

    async def stop(self) -> None:
        """End every server."""
        await together([server.stop() for server in self._servers])

    # ---- placement

    async def _placement(self) -> Any:
        """Room for every rank and engine, ranks first; engines and ranks never share a GPU."""
        deployment = self._deployment
        bundles = [self._resources(1)] * deployment.num_ranks
        bundles += [self._resources(deployment.gpus_per_engine)] * deployment.num_engines
        needed, total = _sum(bundles), self._ray.cluster_resources()
        if any(total.get(kind, 0) < count for kind, count in needed.items()):
            hint = "; --device cpu needs no GPU" if needed["GPU"] else ""
            raise ConfigError(f"the run needs {_shown(needed)}, the cluster has {_shown(total)}{hint}")
        group = self._ray.util.placement_group(bundles, strategy="PACK")
        try:
            await answered(group.ready(), "placement", deployment.start_timeout_s, ServerFailed)
        except ServerFailed as error:
            free = _shown(self._ray.available_resources())
            raise ServerFailed(f"{error}: the run needs {_shown(needed)}, free are {free}") from error
        self._single_node = sum(node["Alive"] for node in self._ray.nodes()) == 1
        return group

    def _resources(self, gpus: int) -> dict[str, float]:
        return {"CPU": 1, "GPU": gpus} if self._deployment.device == "cuda" else {"CPU": 1}

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

    async def _engines(self, group: Any) -> tuple[tuple[StartedEngine, ...], str | None]:
        """The engines, and the URL of the router if there is one; all of them ready."""
        deployment = self._deployment
        engines = await together([self._engine(group, number) for number in range(deployment.num_engines)])
        urls = tuple(engine.url for engine in engines)
        return tuple(engines), await self._router(urls) if deployment.use_router else None

    async def _engine(self, group: Any, number: int) -> StartedEngine:
        deployment = self._deployment
        server = self._server(f"sglang-{number}", self._actor(ServerActor, group, deployment.num_ranks + number))
        host, (port,) = await self._place(server.actor, 1)
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

        async def start() -> None:
            await self._start(server, server_command(launch))
            await self._ready(server, wait_for_server(self._wire, url, deployment.start_timeout_s))

        await start()
        return StartedEngine(url=url, server=server, start=start)

    async def _router(self, urls: tuple[str, ...]) -> str:
        deployment = self._deployment
        server = self._server("router", self._actor(ServerActor, None, 0))
        host, (port, prometheus_port) = await self._place(server.actor, 2)
        launch = RouterLaunch(
            worker_urls=urls, host=host, port=port, prometheus_port=prometheus_port, flags=deployment.router_flags
        )
        url = f"http://{host}:{port}"
        await self._start(server, router_command(launch))
        await self._ready(server, wait_for_router(self._wire, url, urls, deployment.start_timeout_s))
        return url

    def _server(self, name: str, actor: Any) -> Server:
        self._servers.append(Server(name=name, actor=actor, timeout_s=self._deployment.control_timeout_s))
        return self._servers[-1]

    async def _start(self, server: Server, command: Command) -> None:
        log = self._deployment.logs / f"{server.name}.log"
        call = server.actor.start.remote(server.name, command.arguments, command.environment, log)
        await answered(call, f"starting {server.name}", self._deployment.start_timeout_s, ServerFailed)

    async def _ready(self, server: Server, waiting: Awaitable[None]) -> None:
        """Wait until the server is ready, or has ended."""
        with plainly():
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(server.watch(), name=f"watch-{server.name}")
                await waiting
                watch.cancel()

    async def _place(self, actor: Any, num_ports: int) -> tuple[str, tuple[int, ...]]:
        """Where an actor can be reached: on one node, through the loopback interface alone."""
        timeout_s = self._deployment.start_timeout_s
        ports = await answered(actor.free_ports.remote(num_ports), "an actor's ports", timeout_s, ServerFailed)
        if self._single_node:
            return "127.0.0.1", ports
        return await answered(actor.address.remote(), "an actor's address", timeout_s, ServerFailed), ports

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
        if deployment.origin is not None:
            await together(
                [
                    answered(
                        actor.load.remote(deployment.origin),
                        f"trainer rank {rank}, load",
                        deployment.start_timeout_s,
                    )
                    for rank, actor in enumerate(ranks)
                ]
            )
        return ranks

    def _control(self, url: str) -> EngineControl:
        deployment = self._deployment
        num_ranks = deployment.gpus_per_engine if deployment.device == "cuda" else 1
        return EngineControl(self._wire, url, timeout_s=deployment.control_timeout_s, num_ranks=num_ranks)

    async def _updater(self, roster: Roster[WeightReceiver], trainer: RayTrainer, first_rank: Any) -> BroadcastUpdater:
        deployment = self._deployment
        address, _ = await self._place(first_rank, 1)

        async def find_port() -> int:
            _, (port,) = await self._place(first_rank, 1)
            return port

        updater = BroadcastUpdater(
            roster,
            trainer,
            master_address=address,
            find_port=find_port,
            backend="nccl" if deployment.device == "cuda" else "gloo",
            timeout_s=deployment.control_timeout_s,
            pause_mode=deployment.pause_mode,
            is_checked=deployment.trainer.train.check_weight_updates,
        )
        await updater.connect()
        return updater


def _sum(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}


def _shown(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"
