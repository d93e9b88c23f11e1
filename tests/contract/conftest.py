"""The places a promise is tested in: the fake engine, and the real SGLang with its router on this machine's CPU."""

import asyncio
import contextlib
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.engines.fake import FakeEngine, FakeUpdater
from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import EngineControl, wait_for_router, wait_for_server
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.launch import RouterLaunch, ServerLaunch, router_command, server_command
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Weights
from tests.tiny_model import tiny_model
from tests.unit.engines.weight_sync.weight_sets import SendsWeights, scaled

START_S = 300.0
"""SGLang imports for 40 s on two idle cores, and for minutes on busy ones."""


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
    """An engine with somebody who can update its weights and count its requests."""

    engine: RolloutEngine
    updater: Publishes
    num_running: Callable[[], Awaitable[int]]
    weights: Weights
    """What it serves now."""

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


OpenPlace = Callable[[], contextlib.AbstractAsyncContextManager[Place]]


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Server and router, both logging to a folder of theirs.

    As on GPUs there is a pass under way whose tokens have not been read yet, whatever comes; and as where GPUs are
    shared a look at the server's health makes no token: one in the wrong moment of a turn would end the server.
    """
    folder = tmp_path_factory.mktemp("contract")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers imports
        model = tiny_model(folder / "model")
    engine_port, nccl_port, router_port, prometheus_port = free_ports(4)
    engine_url, router_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{router_port}"
    server = server_command(
        ServerLaunch(
            model_path=model,
            port=engine_port,
            nccl_port=nccl_port,
            device="cpu",
            dtype="float32",
            seed=1,
            flags={"disable-overlap-schedule": False},
            shared_gpus=(),
        )
    )
    router = router_command(RouterLaunch(worker_urls=(engine_url,), port=router_port, prometheus_port=prometheus_port))
    with contextlib.ExitStack() as stack:
        began = time.monotonic()
        for name, command in (("server", server), ("router", router)):
            process = ServerProcess(name, command.arguments, command.environment, folder / f"{name}.log")
            stack.callback(process.stop)
        asyncio.run(_until_ready(engine_url, router_url))
        yield Servers(
            model=model,
            engine_url=engine_url,
            nccl_port=nccl_port,
            router_url=router_url,
            ready_s=time.monotonic() - began,
        )


@pytest.fixture
def as_it_was(servers: Servers) -> Iterator[Servers]:
    """Restore the weights after a test that serves others."""
    yield servers

    async def restore() -> None:
        async with open_sglang(servers) as place:
            await place.publish()

    asyncio.run(restore())


@pytest.fixture(params=["fake", "sglang"])
def open_place(request: pytest.FixtureRequest) -> OpenPlace:
    """Opens a place inside the test's own event loop."""
    if request.param == "fake":
        return open_fake
    servers: Servers = request.getfixturevalue("servers")
    return lambda: open_sglang(servers)


@contextlib.asynccontextmanager
async def open_fake() -> AsyncIterator[Place]:
    engine = FakeEngine(lambda request: request.sampling.max_new_tokens + 1, seconds_per_token=0.001)

    async def num_running() -> int:
        return engine.busy

    yield Place(engine=engine, updater=FakeUpdater(engine), num_running=num_running, weights=Weights(version=0, step=0))


@contextlib.asynccontextmanager
async def open_sglang(servers: Servers) -> AsyncIterator[Place]:
    async with HttpClient() as http:
        control = ServerControl(http, servers.engine_url, timeout_s=30.0)
        yield Place(
            engine=SGLangEngine(http, (servers.engine_url,), router_url=servers.router_url, request_timeout_s=30.0),
            updater=_ConnectsFirst(control, servers),
            num_running=control.num_running,
            weights=Weights(version=servers.version, step=servers.version),
        )


class _ConnectsFirst:
    """``BroadcastUpdater`` with a trainer that scales the weights, in a group of its own for each update."""

    def __init__(self, control: ServerControl, servers: Servers) -> None:
        self._control = control
        self._servers = servers

    async def publish(self, weights: Weights) -> object:
        group_name = uuid.uuid4().hex
        sender = SendsWeights(self._servers.model, scaled)
        sender.version = weights.version
        updater = BroadcastUpdater(
            EngineMembership((self._control,)),
            sender,
            master_address="127.0.0.1",
            find_port=a_free_port,
            backend="gloo",
            timeout_s=30.0,
            group_name=group_name,
        )
        await updater.connect()
        report = await updater.publish(weights)
        self._servers.version = weights.version
        await self._control.leave_group(updater.group_name)
        return report


async def a_free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different TCP ports without a listener now."""
    return list(NetworkPlace().free_ports(count))


async def _until_ready(engine_url: str, router_url: str) -> None:
    async with HttpClient() as http:
        await wait_for_server(http, engine_url, START_S)
        await wait_for_router(http, router_url, (engine_url,), START_S)
