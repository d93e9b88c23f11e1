"""The ports of an engine that is started again, and an engine that ends during the start."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.cluster.servers import Servers
from asyncrl.errors import ForeignServer, ServerFailed
from tests.virtual_time import run_virtually


class Addresses:
    """Addresses with other ports at each call."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)

    async def engine(self, actor: Any) -> tuple[str, int, int]:
        return str(actor), next(self._ports), 9

    async def router(self, actor: str) -> tuple[str, int, int]:
        return actor, next(self._ports), 9


def servers_of(engine_actor: Any, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """The servers of a deployment with one engine and a router."""
    failures = SimpleNamespace(control_timeout_s=1.0, request_timeout_s=1.0)
    model = SimpleNamespace(hf_checkpoint="model", seed=1)
    deployment: Any = SimpleNamespace(
        cluster=SimpleNamespace(
            rollout_num_gpus_per_engine=1, num_engines=1, colocate=False, start_timeout_s=600.0, use_router=True
        ),
        failures=failures,
        trainer=SimpleNamespace(model=model, device="cpu", dtype="float32"),
        key="key",
        ranks_per_engine=1,
        routes=None,
        server_flags={},
        router_flags={},
        needed_plugins=(),
    )
    placement: Any = SimpleNamespace(engine=engine_actor, here=lambda kind: "here", kill=None)
    addresses: Any = Addresses()
    http: Any = None
    servers = Servers(placement, deployment, http, addresses)

    async def no_plugins(*_: Any) -> None:
        return None

    monkeypatch.setattr(servers, "_plugins_of", no_plugins)
    return servers


def test_each_start_of_an_engine_has_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, refusals = iter(("here", "there")), [False, False, True, False, False]
    servers = servers_of(lambda kind, number: next(actors), monkeypatch)

    async def run(*_: Any) -> None:
        if refusals.pop(0):
            raise ForeignServer("another program answers")

    monkeypatch.setattr(servers, "_run", run)

    async def urls() -> list[str]:
        engine = await servers._engine(0, ())  # noqa: SLF001
        found = [engine.url, (await engine.start()).url]
        with pytest.raises(ForeignServer):
            await engine.start()
        found.append((await engine.start()).url)
        engine.server.actor = engine.server.create()
        return [*found, (await engine.start()).url]

    assert asyncio.run(urls()) == ["http://here:1", "http://here:2", "http://here:4", "http://there:5"]


def test_the_start_ends_when_an_engine_ends_before_the_router_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        if asyncio.get_running_loop().time() > 5.0:
            raise ServerFailed("sglang-0 ended with code 1")

    actor: Any = SimpleNamespace(check=SimpleNamespace(remote=check))
    servers = servers_of(lambda kind, number: actor, monkeypatch)

    async def run(server: Any, *_: Any) -> None:
        await asyncio.sleep(600.0 if server.name == "router" else 3.0)

    async def seconds() -> float:
        with pytest.raises(ServerFailed, match="sglang-0 ended with code 1"):
            await servers.start(())
        return asyncio.get_running_loop().time()

    monkeypatch.setattr(servers, "_run", run)
    assert run_virtually(seconds())[0] < 6.0
