"""The modelled engines behind ``RolloutEngine``, on the virtual clock."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from asyncrl.errors import EngineLost
from asyncrl.sim.clock import run_virtually
from asyncrl.sim.model.costs import Costs, Failures
from asyncrl.sim.model.fleet import Fleet
from asyncrl.sim.model.least_loaded import LeastLoaded
from asyncrl.sim.model.workload import Workload
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights
from tests.sim.settings import ENGINE, LENGTHS

FAST = Costs(engine=replace(ENGINE, prefill_tokens_per_s=1e12))
OLD, NEW = Weights(version=0, step=0), Weights(version=1, step=1)


class Twenty:
    """Lengths of 20 tokens for every answer."""

    cut = 20

    def tokens(self, row: int, index: int) -> int:
        return 20

    def with_seed(self, seed: int) -> "Twenty":
        return self


def request(name: str = "g0.0", written: int = 0) -> Request:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=30 - written)
    return Request(request_id=name, token_ids=(7, 0, *(0,) * written), sampling=sampling, seed=0, weights=OLD)


def fleet_of(num_engines: int = 1, costs: Costs = FAST) -> Fleet:
    return Fleet(costs, Workload(lengths=Twenty(), prompt_tokens=2, grain=1), num_engines, OLD)


async def during(fleet: Fleet, act: Callable[[], Awaitable[None]]) -> tuple[FinishReason, list[Chunk]]:
    """Run one request and ``act`` at the same time."""
    chunks: list[Chunk] = []
    async with asyncio.TaskGroup() as both:
        task = both.create_task(fleet.generate(request(), chunks.append))
        both.create_task(_plainly(act))
    return task.result(), chunks


async def _plainly(act: Callable[[], Awaitable[None]]) -> None:
    await act()


async def nothing() -> None:
    pass


def test_a_request_takes_the_time_of_its_tokens() -> None:
    async def main() -> tuple[FinishReason, list[Chunk]]:
        return await during(fleet_of(), nothing)

    (reason, chunks), seconds = run_virtually(main())
    assert reason is FinishReason.STOP
    assert [len(chunk.token_ids) for chunk in chunks] == [20]
    assert seconds == pytest.approx(20 * 0.011)


def test_the_prefix_of_a_resubmitted_request_is_not_written_again() -> None:
    async def main() -> list[Chunk]:
        chunks: list[Chunk] = []
        await fleet_of().generate(request("g0.0-1", written=15), chunks.append)
        return chunks

    chunks, seconds = run_virtually(main())
    assert sum(len(chunk.token_ids) for chunk in chunks) == 5
    assert seconds == pytest.approx(5 * 0.011)


def test_tokens_on_either_side_of_an_update_name_their_version() -> None:
    async def main() -> tuple[FinishReason, list[Chunk]]:
        fleet = fleet_of()

        async def update() -> None:
            await asyncio.sleep(0.115)  # ten and a half tokens
            fleet.pause()
            await asyncio.sleep(1.0)
            fleet.continue_generation(NEW, recompute=False)

        return await during(fleet, update)

    (_, chunks), seconds = run_virtually(main())
    assert [(chunk.version, len(chunk.token_ids)) for chunk in chunks] == [(0, 10), (1, 10)]
    assert seconds == pytest.approx(20 * 0.011 + 1.0)


def test_an_interruption_delivers_the_tokens_so_far() -> None:
    async def main() -> tuple[FinishReason, list[Chunk]]:
        fleet = fleet_of()

        async def interrupt() -> None:
            await asyncio.sleep(0.115)
            await fleet.interrupt()
            assert not fleet.is_busy

        return await during(fleet, interrupt)

    (reason, chunks), _ = run_virtually(main())
    assert reason is FinishReason.ABORT
    assert sum(len(chunk.token_ids) for chunk in chunks) == 10


def test_cancelling_a_request_takes_it_off_and_still_counts_its_tokens() -> None:
    async def main() -> tuple[list[Chunk], float]:
        fleet, chunks = fleet_of(), list[Chunk]()
        async with asyncio.TaskGroup() as tasks:
            cancelled = tasks.create_task(fleet.generate(request(), chunks.append))
            other = tasks.create_task(fleet.generate(request("g0.1"), lambda chunk: None))
            await asyncio.sleep(0.12 + 1e-6)  # ten tokens of two requests
            cancelled.cancel()
            await other
        return chunks, asyncio.get_running_loop().time()

    (chunks, seconds), _ = run_virtually(main())
    assert sum(len(chunk.token_ids) for chunk in chunks) == 10
    assert seconds == pytest.approx(10 * 0.012 + 10 * 0.011, abs=1e-4)


def test_a_lost_engine_raises_and_comes_back() -> None:
    costs = replace(FAST, failures=Failures(mean_s=0.1, restart_s=3.0))

    async def main() -> tuple[int, float]:
        fleet, chunks = fleet_of(costs=costs), list[Chunk]()
        fleet.start_failing(seed=3)
        with pytest.raises(EngineLost):
            await fleet.generate(request(), chunks.append)
        written = sum(len(chunk.token_ids) for chunk in chunks)
        assert 0 < written < 20
        lost_at = asyncio.get_running_loop().time()
        await fleet.generate(request("g0.0-1", written=19), chunks.append)
        return fleet.lost, asyncio.get_running_loop().time() - lost_at

    (lost, waited), _ = run_virtually(main())
    assert lost == 1
    assert waited == pytest.approx(3.0 + 0.011)


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    loads = LeastLoaded(3)
    assert sorted(loads.pick() or 0 for _ in range(3)) == [0, 1, 2]
    loads.release(1)
    assert loads.pick() == 1
    loads.take_down(0)
    loads.release(0)
    assert {loads.pick(), loads.pick()} == {1, 2}
    loads.bring_up(0)
    assert loads.pick() == 0


def test_lengths_belong_to_the_row_and_the_place_whatever_the_attempt() -> None:
    workload = Workload(lengths=LENGTHS, prompt_tokens=2, grain=1)
    whole = workload.units_left(request("g3.1"))
    assert workload.units_left(request("g9.1-2", written=1)) == whole - 1
    assert workload.units_left(request("g3~1.1")) == whole
    assert workload.units_left(request("g3.2")) != whole
