"""What ``BroadcastUpdater`` does with engines and a trainer that fail, hang or are slow."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.weights import BroadcastUpdater, PauseMode
from asyncrl.errors import AsyncRLError, EngineLost, TrainerFailed, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights

Step = Callable[[str], Awaitable[None]]


async def nothing(step: str) -> None:
    """All is well."""


def failing(at: str, error: Exception) -> Step:
    async def step(name: str) -> None:
        if name == at:
            raise error

    return step


def hanging(at: str) -> Step:
    async def step(name: str) -> None:
        if name == at:
            await asyncio.Event().wait()

    return step


class Engine:
    """Writes down what it is told."""

    def __init__(self, url: str, num_ranks: int = 1, step: Step = nothing) -> None:
        self.url = url
        self.num_ranks = num_ranks
        self.told: list[str] = []
        self._step = step

    async def pause(self, mode: PauseMode) -> None:
        await self._do(f"pause {mode}")

    async def go_on(self) -> None:
        await self._do("go on")

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        await self._do(f"rank {rank_offset} of {world_size}")

    async def receive(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> None:
        await self._do(f"{bucket.names[0]} {label}")

    async def _do(self, what: str) -> None:
        self.told.append(what)
        await self._step(what)


class Trainer:
    """Two buckets."""

    def __init__(self, step: Step = nothing) -> None:
        self._step = step

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        return tuple(
            WeightBucket(names=(name,), dtypes=("float32",), shapes=((2,),), num_bytes=8) for name in ("one", "two")
        )

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        await self._step("join")

    async def send(self, index: int) -> None:
        await self._step(f"send {index}")


def push(
    *engines: Engine, trainer: Trainer, timeout_s: float = 5.0, pause_mode: PauseMode = "in_place"
) -> UpdateReport:
    async def run() -> UpdateReport:
        updater = BroadcastUpdater(
            engines,
            trainer,
            master_address="here",
            master_port=1,
            backend="gloo",
            timeout_s=timeout_s,
            pause_mode=pause_mode,
        )
        await updater.connect()
        return await updater.push(Weights(version=3, step=6))

    return asyncio.run(run())


def failure(*engines: Engine, trainer: Trainer, timeout_s: float = 5.0) -> str:
    with pytest.raises(WeightUpdateFailed) as error:
        push(*engines, trainer=trainer, timeout_s=timeout_s)
    return str(error.value)


def test_engines_pause_take_every_bucket_and_go_on_labelled_by_the_last() -> None:
    a, b = Engine("a", 2), Engine("b")
    report = push(a, b, trainer=Trainer())
    assert a.told == ["rank 1 of 4", "pause in_place", "one None", "two 3", "go on"]
    assert b.told == ["rank 3 of 4", *a.told[1:]]
    assert report.num_bytes == 16


def test_every_engine_is_told_what_becomes_of_its_cache() -> None:
    a, b = Engine("a"), Engine("b")
    push(a, b, trainer=Trainer(), pause_mode="retract")
    assert [engine.told[1] for engine in (a, b)] == ["pause retract"] * 2


def test_a_failure_names_the_engine_the_step_and_the_cause() -> None:
    said = failure(Engine("a"), Engine("b", step=failing("two 3", EngineLost("gone"))), trainer=Trainer())
    assert said == "sending bucket 2 of 2: b: gone"


def test_a_trainer_that_fails_is_named() -> None:
    assert failure(Engine("a"), trainer=Trainer(failing("join", TrainerFailed("boom")))).endswith("trainer: boom")
    assert "trainer: boom" in failure(Engine("a"), trainer=Trainer(failing("send 1", TrainerFailed("boom"))))


def test_who_does_not_answer_is_named() -> None:
    said = failure(Engine("a"), Engine("b", step=hanging("one None")), trainer=Trainer(), timeout_s=0.1)
    assert said == "sending bucket 1 of 2: no answer from b within 0.1 s"


def test_engines_go_on_when_nothing_was_sent_and_stay_paused_when_something_was() -> None:
    a = Engine("a")
    failure(a, Engine("b", step=failing("pause in_place", EngineLost("gone"))), trainer=Trainer())
    assert a.told[-2:] == ["pause in_place", "go on"]
    a = Engine("a")
    failure(a, trainer=Trainer(failing("send 1", TrainerFailed("boom"))))
    assert a.told[-1] == "two 3"


def test_a_bug_is_not_an_update_failure() -> None:
    with pytest.raises(KeyError):
        push(Engine("a", step=failing("pause in_place", KeyError("typo"))), trainer=Trainer())


def test_no_exception_group_leaves() -> None:
    both = failing("pause in_place", EngineLost("gone"))
    with pytest.raises(AsyncRLError):
        push(Engine("a", step=both), Engine("b", step=both), trainer=Trainer())
