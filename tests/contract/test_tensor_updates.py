"""Weights by shared memory: what ``TensorUpdater`` does, and what the real SGLang serves after it and after a turn."""

import asyncio
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
from asyncrl.errors import EngineLost, TrainerFailed, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights
from tests.contract.conftest import Servers
from tests.unit.engines.weight_sync.recorders import TwoBuckets
from tests.unit.engines.weight_sync.weight_sets import SendsWeights, Teacher, scaled, weight_set

TOKENS = tuple(range(2, 34))
CLOSE = 1e-4
"""Engine and teacher agree to 5e-6; other weights are apart by whole nats."""


class Sharer(TwoBuckets):
    """A trainer of several ranks with two buckets, whose handles are their names."""

    def __init__(self, num_ranks: int, told: list[str], error: Exception | None = None) -> None:
        self._num_ranks = num_ranks
        self._told = told
        self._error = error

    async def share(self, bucket: int) -> list[str]:
        self._told.append(f"share {bucket}")
        if self._error is not None:
            raise self._error
        return [f"{bucket} of rank {rank}" for rank in range(self._num_ranks)]

    async def unshare(self) -> None:
        self._told.append("unshare")


class Receiver:
    """An engine that writes down what it is told to load."""

    def __init__(self, url: str, num_ranks: int, told: list[str], error: Exception | None = None) -> None:
        self.url = url
        self.num_ranks = num_ranks
        self._told = told
        self._error = error

    async def receive_handles(self, handles: Sequence[str], *, label: str | None) -> None:
        await asyncio.sleep(0)
        self._told.append(f"{self.url}: {', '.join(handles)} {label}")
        if self._error is not None:
            raise self._error


def publish(sharer: Sharer, *engines: Receiver, ranks_per_engine: int = 1) -> UpdateReport:
    async def run() -> UpdateReport:
        updater = TensorUpdater(engines, sharer, ranks_per_engine=ranks_per_engine, timeout_s=5.0)
        await updater.connect()
        assert not await updater.snapshot()
        return await updater.publish(Weights(version=3, step=2))

    return asyncio.run(run())


def test_engines_load_the_handles_of_their_own_ranks_and_the_last_bucket_brings_the_label() -> None:
    told: list[str] = []
    report = publish(Sharer(4, told), Receiver("a", 2, told), Receiver("b", 2, told), ranks_per_engine=2)
    assert told == [
        "share 0",
        "a: 0 of rank 0, 0 of rank 1 None",
        "b: 0 of rank 2, 0 of rank 3 None",
        "share 1",
        "a: 1 of rank 0, 1 of rank 1 3",
        "b: 1 of rank 2, 1 of rank 3 3",
        "unshare",
    ]
    assert report.num_bytes == 16


def test_an_engine_on_a_cpu_is_one_rank_and_takes_the_first_handle() -> None:
    told: list[str] = []
    publish(Sharer(4, told), Receiver("a", 1, told), Receiver("b", 1, told), ranks_per_engine=2)
    assert told[1:3] == ["a: 0 of rank 0 None", "b: 0 of rank 2 None"]


def test_who_fails_is_named_and_no_later_bucket_is_shared() -> None:
    told: list[str] = []
    with pytest.raises(WeightUpdateFailed, match="loading bucket 0: b: gone"):
        publish(Sharer(2, told), Receiver("a", 1, told), Receiver("b", 1, told, EngineLost("gone")))
    assert "share 1" not in told
    with pytest.raises(WeightUpdateFailed, match="sharing bucket 0: trainer: boom"):
        publish(Sharer(1, [], TrainerFailed("boom")), Receiver("a", 1, []))


# ---- with the real SGLang


class SharesWeights(SendsWeights):
    """The same weights from this process's memory, and a trainer's memory that is none."""

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


async def _served(servers: Servers, sharer: SharesWeights, version: int, *, in_turns: bool) -> Sequence[float]:
    """Publish a version, in turns or not, and score some tokens."""
    async with HttpClient() as http:
        control = EngineControl(http, servers.engine_url, timeout_s=30.0)
        gpus = SharedGpus([control], sharer, holder="engines", timeout_s=30.0)
        updater = TensorUpdater([control], sharer, ranks_per_engine=1, timeout_s=30.0)
        await updater.connect()
        sharer.version = version
        if in_turns:
            await gpus.acquire_for_training()
            await gpus.acquire_for_update()
        await updater.publish(Weights(version=version, step=version))
        if in_turns:
            await gpus.acquire_for_generation()
        engine = SGLangEngine(http, (servers.engine_url,), router_url=None, request_timeout_s=30.0)
        scores = await engine.score(TOKENS, 8)
        assert (await http.look(f"{servers.engine_url}/model_info", 30.0))["weight_version"] == str(version)
        return scores


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_what_is_served_after_each_turn_is_what_was_shared(as_it_was: Servers) -> None:
    sharer, teacher = SharesWeights(as_it_was.model, weight_set), Teacher(as_it_was.model)
    before: Sequence[float] = ()
    for in_turns in (False, True, True):
        as_it_was.version += 1
        scores = asyncio.run(_served(as_it_was, sharer, as_it_was.version, in_turns=in_turns))
        assert scores == pytest.approx(teacher.scores(as_it_was.version, TOKENS, 8), abs=CLOSE)
        assert scores != pytest.approx(before, abs=CLOSE) if before else True
        before = scores


@pytest.mark.timeout(400)
def test_no_shared_memory_is_left_behind(as_it_was: Servers) -> None:
    mine = re.compile(r"torch_\d+")
    before = {path.name for path in Path("/dev/shm").iterdir() if mine.match(path.name)}
    asyncio.run(_served(as_it_was, SharesWeights(as_it_was.model, scaled), as_it_was.version, in_turns=True))
    after = {path.name for path in Path("/dev/shm").iterdir() if mine.match(path.name)}
    assert after <= before
