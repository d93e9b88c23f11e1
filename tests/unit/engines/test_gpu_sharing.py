"""The commands that time-shared GPUs get, their order, and the errors of an engine or the trainer."""

from collections.abc import Sequence

import pytest

from asyncrl.engines.gpu_sharing import GpuHolder, SharedGpus, release_engines
from asyncrl.errors import EngineLost, GpuSharingFailed, TrainerFailed
from asyncrl.sim.clock import run_virtually
from tests.steps import Step, failing, hanging, nothing


class Engine:
    """An engine that records its commands in a list shared by all."""

    def __init__(self, url: str, told: list[str], step: Step = nothing) -> None:
        self.url = url
        self._told = told
        self._step = step

    async def empty(self) -> None:
        await self._do("empty")

    async def release(self, parts: Sequence[str]) -> None:
        await self._do(f"release {' '.join(parts)}")

    async def resume(self, parts: Sequence[str]) -> None:
        await self._do(f"resume {' '.join(parts)}")

    async def _do(self, what: str) -> None:
        self._told.append(f"{self.url}: {what}")
        await self._step(what)


class Trainer:
    """A trainer that records its commands in the same list."""

    def __init__(self, told: list[str], step: Step = nothing) -> None:
        self._told = told
        self._step = step

    async def fetch(self) -> None:
        await self._do("fetch")

    async def put_away_optimizer(self) -> None:
        await self._do("put away optimizer")

    async def put_away_weights(self) -> None:
        await self._do("put away weights")

    async def _do(self, what: str) -> None:
        self._told.append(what)
        await self._step(what)


def shared(told: list[str], holder: GpuHolder, *, engine: Step = nothing, trainer: Step = nothing) -> SharedGpus:
    engines = (Engine("a", told), Engine("b", told, engine))
    return SharedGpus(engines, Trainer(told, trainer), holder=holder, timeout_s=5.0)


def test_gpu_memory_is_acquired_only_after_the_other_side_released_it() -> None:
    told: list[str] = []

    async def a_step() -> None:
        gpus = shared(told, "engines")
        await gpus.acquire_for_training()
        await gpus.acquire_for_update()
        await gpus.acquire_for_generation()

    run_virtually(a_step())
    assert told == [
        "a: empty",
        "b: empty",
        "a: release weights kv_cache cuda_graph",
        "b: release weights kv_cache cuda_graph",
        "fetch",
        "put away optimizer",
        "a: resume weights",
        "b: resume weights",
        "put away weights",
        "a: resume kv_cache cuda_graph",
        "b: resume kv_cache cuda_graph",
    ]


def test_acquiring_the_gpus_twice_has_no_effect() -> None:
    told: list[str] = []

    async def twice() -> None:
        gpus = shared(told, "trainer")
        await gpus.acquire_for_training()
        assert told == []
        await gpus.acquire_for_update()
        await gpus.acquire_for_update()
        await gpus.acquire_for_generation()
        await gpus.acquire_for_generation()

    run_virtually(twice())
    assert len(told) == len(set(told)) == 6


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (failing("empty", EngineLost("gone")), "emptying engines: b: gone"),
        (failing("release weights kv_cache cuda_graph", EngineLost("gone")), "releasing memory: b: gone"),
        (hanging("empty"), "emptying engines: no answer from b within 5 s"),
        (failing("resume weights", EngineLost("gone")), "resuming weights: b: gone"),
        (hanging("resume kv_cache cuda_graph"), "resuming caches: no answer from b within 5 s"),
    ],
)
def test_an_engine_that_fails_is_named(step: Step, line: str) -> None:
    async def a_step() -> None:
        gpus = shared([], "engines", engine=step)
        await gpus.acquire_for_training()
        await gpus.acquire_for_update()
        await gpus.acquire_for_generation()

    with pytest.raises(GpuSharingFailed, match=line):
        run_virtually(a_step())


def test_a_trainer_that_fails_is_named_and_does_not_get_the_gpus() -> None:
    gpus = shared([], "engines", trainer=failing("fetch", TrainerFailed("boom")))
    with pytest.raises(GpuSharingFailed, match="fetching the trainer's memory: trainer: boom"):
        run_virtually(gpus.acquire_for_training())
    assert gpus.holder == "engines"


def test_taking_shared_gpus_out_of_order_is_refused() -> None:
    with pytest.raises(AssertionError):
        run_virtually(shared([], "engines").acquire_for_update())
    with pytest.raises(AssertionError):
        run_virtually(shared([], "update").acquire_for_training())
    with pytest.raises(AssertionError):
        run_virtually(shared([], "trainer").acquire_for_generation())


def test_engines_that_have_just_started_release_all_memory() -> None:
    told: list[str] = []
    run_virtually(release_engines([Engine("a", told)], 5.0))
    assert told == ["a: empty", "a: release weights kv_cache cuda_graph"]
