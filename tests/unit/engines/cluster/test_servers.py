"""The ports of an engine that is started again."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engines.cluster.servers import Servers
from asyncrl.errors import ForeignServer


class Addresses:
    """Addresses with other ports at each call."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)

    async def engine(self, actor: str) -> tuple[str, int, int]:
        return actor, next(self._ports), 9


def test_an_engine_keeps_its_ports_until_a_start_fails_or_its_actor_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors, refusals = iter(("here", "there")), [False, False, True, False, False]
    cluster = SimpleNamespace(rollout_num_gpus_per_engine=1, colocate=False, start_timeout_s=1.0)
    model = SimpleNamespace(hf_checkpoint="model", seed=1)
    deployment: Any = SimpleNamespace(
        cluster=cluster,
        failures=SimpleNamespace(control_timeout_s=1.0, request_timeout_s=1.0),
        trainer=SimpleNamespace(model=model, device="cpu", dtype="float32"),
        key="key",
        ranks_per_engine=1,
        routes=None,
        server_flags={},
        needed_plugins=(),
    )
    placement: Any = SimpleNamespace(engine=lambda kind, number: next(actors), kill=None)
    addresses: Any = Addresses()
    http: Any = None
    servers = Servers(placement, deployment, http, addresses)

    async def run(*_: Any) -> None:
        if refusals.pop(0):
            raise ForeignServer("another program answers")

    async def no_plugins(*_: Any) -> None:
        return None

    monkeypatch.setattr(servers, "_run", run)
    monkeypatch.setattr(servers, "_plugins_of", no_plugins)

    async def urls() -> list[str]:
        engine = await servers._engine(0, ())  # noqa: SLF001
        found = [engine.url, (await engine.start()).url]
        with pytest.raises(ForeignServer):
            await engine.start()
        found.append((await engine.start()).url)
        engine.server.actor = engine.server.create()
        return [*found, (await engine.start()).url]

    assert asyncio.run(urls()) == ["http://here:1", "http://here:1", "http://here:2", "http://there:3"]
