"""The order in which ``TensorUpdater`` shares buckets with its engines, and the failures that end an update."""

import asyncio
from collections.abc import Sequence

import pytest

from asyncrl.engines.weight_sync.cuda_ipc import TensorUpdater
from asyncrl.errors import EngineLost, TrainerFailed, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights
from tests.unit.engines.weight_sync.recorders import TwoBuckets


class Sharer(TwoBuckets):
    """A trainer of several ranks with two buckets, whose handles are the names of bucket and rank."""

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
    """An engine that records the handles that it is told to load."""

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


def test_engines_load_the_handles_of_their_own_ranks_and_the_last_bucket_carries_the_label() -> None:
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


def test_an_engine_on_a_cpu_is_one_rank_and_loads_the_first_handle() -> None:
    told: list[str] = []
    publish(Sharer(4, told), Receiver("a", 1, told), Receiver("b", 1, told), ranks_per_engine=2)
    assert told[1:3] == ["a: 0 of rank 0 None", "b: 0 of rank 2 None"]


def test_a_failure_names_the_bucket_and_the_engine_and_ends_the_update() -> None:
    told: list[str] = []
    with pytest.raises(WeightUpdateFailed, match="loading bucket 0: b: gone"):
        publish(Sharer(2, told), Receiver("a", 1, told), Receiver("b", 1, told, EngineLost("gone")))
    assert "share 1" not in told
    with pytest.raises(WeightUpdateFailed, match="sharing bucket 0: trainer: boom"):
        publish(Sharer(1, [], TrainerFailed("boom")), Receiver("a", 1, []))
