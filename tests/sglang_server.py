"""The start of a real SGLang server behind a real router on this machine's CPU, and clients for it."""

import asyncio
import contextlib
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import EngineControl, wait_for_router, wait_for_server
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.routes import RoutesShape
from asyncrl.engines.sglang.launch import Command, Flags, RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Weights
from tests.ports import free_ports
from tests.tiny_model import tiny_model
from tests.unit.engines.weight_sync.weight_sets import SendsWeights, scaled

START_S = 900.0
"""Limit for the start: SGLang imports for 40 s on two idle cores, and for minutes on busy ones."""

KEY = "key-of-tests"
"""The key of every server and router here."""
BEARER = {"Authorization": f"Bearer {KEY}"}

SILENCE_S = 450.0
"""Limit for the silence within an answer: the first repetition penalty waits for a compiler, half a minute if busy."""


CONTROL_S = 90.0
"""Limit for each control request and update."""


class ServerControl(EngineControl):
    """``EngineControl`` with requests that only tests make."""

    async def leave_group(self, group_name: str) -> None:
        """Leave a weight-update group."""
        await self._post("destroy_weights_update_group", {"group_name": group_name})

    async def num_running(self) -> int:
        """Requests on the server, waiting ones included."""
        loads = (await self._http.look(f"{self.url}/v1/loads?include=core", self._timeout_s))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


class Publishes(Protocol):
    """The part of ``WeightUpdater`` that a place needs."""

    async def publish(self, weights: Weights) -> object:
        """Return once the engine samples from other weights than before, labelled ``weights``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An engine, fake or real, with an updater of its weights and a count of its requests."""

    engine: RolloutEngine
    updater: Publishes
    num_running: Callable[[], Awaitable[int]]
    weights: Weights
    """The weights that the engine served when the place was opened."""

    async def publish(self) -> Weights:
        """Put different weights into the engine."""
        new = Weights(version=self.weights.version + 1, step=self.weights.step + 1)
        await self.updater.publish(new)
        return new


@dataclass(slots=True, kw_only=True)
class Servers:
    """One real engine behind a real router."""

    model: Path
    engine_url: str
    nccl_port: int
    router_url: str
    ready_s: float
    version: int = 0
    """The version of the weights that the engine serves now."""


@contextlib.contextmanager
def start_servers(
    folder: Path, make_model: Callable[[Path], Path] = tiny_model, flags: Flags | None = None
) -> Iterator[Servers]:
    """Start a server and a router that log to ``folder``; stop them at the end of the block.

    As on GPUs, a pass whose tokens have not been read is always under way (overlap scheduling).  As where GPUs are
    shared, the health endpoint generates no token: a token while the weights are away would end the server.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers imports
        model = make_model(folder / "model")
    engine_port, nccl_port, router_port, prometheus_port = free_ports(4)
    engine_url, router_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{router_port}"
    router = router_command(
        RouterLaunch(worker_urls=(engine_url,), port=router_port, key=KEY, prometheus_port=prometheus_port)
    )
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        for name, command in (("server", _server_command(model, engine_port, nccl_port, flags)), ("router", router)):
            process = ServerProcess(name, command.arguments, command.environment, folder / f"{name}.log", command.key)
            stack.callback(process.stop)
        asyncio.run(_until_ready(engine_url, router_url))
        yield Servers(
            model=model,
            engine_url=engine_url,
            nccl_port=nccl_port,
            router_url=router_url,
            ready_s=time.monotonic() - began,
        )


def _server_command(model: Path, port: int, nccl_port: int, flags: Flags | None) -> Command:
    return server_command(
        ServerLaunch(
            model_path=model,
            port=port,
            key=KEY,
            nccl_port=nccl_port,
            device="cpu",
            dtype="float32",
            seed=1,
            flags={"disable-overlap-schedule": False, **(flags or {})},
            shared_gpus=(),
        )
    )


async def _until_ready(engine_url: str, router_url: str) -> None:
    async with HttpClient(KEY) as http:
        await wait_for_server(http, engine_url, START_S)
        await wait_for_router(http, router_url, (engine_url,), START_S)


def main_process(servers: Servers) -> psutil.Process:
    """The server's main process; its scheduler is a child."""
    port = servers.engine_url.rpartition(":")[2]
    every = psutil.process_iter(["cmdline"])  # None for a process that has just ended
    (main,) = (each for each in every if {"sglang.launch_server", port} <= set(each.info["cmdline"] or ()))
    return main


@contextlib.asynccontextmanager
async def open_sglang(servers: Servers, routes: RoutesShape | None = None) -> AsyncIterator[Place]:
    """Open a client of ``servers`` inside the test's event loop."""
    async with HttpClient(KEY) as http:
        control = ServerControl(http, servers.engine_url, timeout_s=CONTROL_S)
        yield Place(
            engine=SGLangEngine(
                http,
                (servers.engine_url,),
                router_url=servers.router_url,
                request_timeout_s=SILENCE_S,
                routes=routes,
            ),
            updater=_ScalingUpdater(control, servers),
            num_running=control.num_running,
            weights=Weights(version=servers.version, step=servers.version),
        )


class _ScalingUpdater:
    """``BroadcastUpdater`` with a trainer that scales the weights, in a new group for each update."""

    def __init__(self, control: ServerControl, servers: Servers) -> None:
        self._control = control
        self._servers = servers

    async def publish(self, weights: Weights) -> object:
        sender = SendsWeights(self._servers.model, scaled)
        sender.version = weights.version
        updater = BroadcastUpdater(
            EngineMembership((self._control,)),
            sender,
            master_address="127.0.0.1",
            find_port=a_free_port,
            backend="gloo",
            timeout_s=CONTROL_S,
            group_name=uuid.uuid4().hex,
        )
        await updater.connect()
        report = await updater.publish(weights)
        self._servers.version = weights.version
        await self._control.leave_group(updater.group_name)
        return report


async def a_free_port() -> int:
    return free_ports(1)[0]
