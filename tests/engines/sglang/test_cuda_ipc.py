"""Weights shared by memory with the real SGLang: it serves them after each update and each acquisition of the GPUs."""

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.gpu_sharing import SharedGpus
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.weight_sync.cuda_ipc import TensorUpdater
from asyncrl.types import Weights
from tests.sglang_server import KEY, Servers
from tests.unit.engines.weight_sync.weight_sets import SendsWeights, Teacher, scaled, weight_set

TOKENS = tuple(range(2, 34))
CLOSE = 1e-4
"""Tolerance of log-probs: engine and teacher agree to 5e-6; other weights differ by whole nats."""


class SharesWeights(SendsWeights):
    """A sender that shares the weights from this process's memory; a trainer without memory to offload."""

    def __init__(self, model: Path, weights_of: Callable[[Path, int], dict[str, Any]]) -> None:
        super().__init__(model, weights_of)
        self._flat: Any = None

    async def share(self, bucket: int) -> list[str]:
        from asyncrl.engines.megatron.weights.handles import handle_of
        from asyncrl.engines.megatron.weights.update_group import flatten

        tensors, buckets = self._weights_of(self._model, self.version), await self.weight_buckets()
        self._flat = flatten(tensors[name] for name in buckets[bucket].names)
        return [handle_of(self._flat, buckets[bucket])]

    async def unshare(self) -> None:
        self._flat = None

    async def fetch(self) -> None: ...

    async def put_away_optimizer(self) -> None: ...

    async def put_away_weights(self) -> None: ...


async def _served(servers: Servers, sharer: SharesWeights, version: int, *, is_time_shared: bool) -> Sequence[float]:
    """Publish a version, with engine and trainer time-sharing the GPUs or not, and score some tokens."""
    async with HttpClient(KEY) as http:
        control = EngineControl(http, servers.engine_url, timeout_s=90.0)
        gpus = SharedGpus([control], sharer, holder="engines", timeout_s=90.0)
        updater = TensorUpdater([control], sharer, ranks_per_engine=1, timeout_s=90.0)
        await updater.connect()
        sharer.version = version
        if is_time_shared:
            await gpus.acquire_for_training()
            await gpus.acquire_for_update()
        await updater.publish(Weights(version=version, step=version))
        if is_time_shared:
            await gpus.acquire_for_generation()
        engine = SGLangEngine(http, (servers.engine_url,), router_url=None, request_timeout_s=90.0)
        scores = await engine.score(TOKENS, 8)
        assert (await http.look(f"{servers.engine_url}/model_info", 30.0))["weight_version"] == str(version)
        return scores


@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_the_server_serves_the_shared_weights_after_each_update(restored_servers: Servers) -> None:
    sharer, teacher = SharesWeights(restored_servers.model, weight_set), Teacher(restored_servers.model)
    before: Sequence[float] = ()
    for is_time_shared in (False, True, True):
        restored_servers.version += 1
        scores = asyncio.run(_served(restored_servers, sharer, restored_servers.version, is_time_shared=is_time_shared))
        assert scores == pytest.approx(teacher.scores(restored_servers.version, TOKENS, 8), abs=CLOSE)
        assert scores != pytest.approx(before, abs=CLOSE) if before else True
        before = scores


@pytest.mark.timeout(1200)
def test_no_shared_memory_is_left_behind(restored_servers: Servers) -> None:
    mine = re.compile(rf"torch_{os.getpid()}_")  # other tests may share memory at the same time
    before = {path.name for path in Path("/dev/shm").iterdir() if mine.match(path.name)}
    sharer = SharesWeights(restored_servers.model, scaled)
    asyncio.run(_served(restored_servers, sharer, restored_servers.version, is_time_shared=True))
    after = {path.name for path in Path("/dev/shm").iterdir() if mine.match(path.name)}
    assert after <= before
