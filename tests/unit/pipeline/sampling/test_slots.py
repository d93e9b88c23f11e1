"""Slots hold one sample each, and are released however it ends."""

import asyncio

import pytest

from asyncrl.pipeline.sampling.slots import Slots
from tests.virtual_time import run_virtually


def test_the_lowest_free_slot_is_held_and_given_back_however_the_body_ends() -> None:
    async def main() -> None:
        slots = Slots(2)
        async with slots.hold() as first:
            with pytest.raises(RuntimeError, match="broken"):
                async with slots.hold() as second:
                    assert (first, second, slots.in_use) == (0, 1, 2)
                    raise RuntimeError("broken")
            assert slots.in_use == 1
        assert slots.in_use == 0
        async with slots.hold() as again:
            assert again == 0

    run_virtually(main())


def test_waiters_get_slots_in_order_and_may_be_cancelled() -> None:
    async def main() -> list[tuple[str, float]]:
        slots, got = Slots(1), list[tuple[str, float]]()

        async def sample(name: str) -> None:
            async with slots.hold():
                got.append((name, asyncio.get_running_loop().time()))
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as samples:
            samples.create_task(sample("a"))
            given_up = samples.create_task(sample("b"))
            samples.create_task(sample("c"))
            await asyncio.sleep(0.5)
            given_up.cancel()
        assert slots.in_use == 0
        return got

    assert run_virtually(main())[0] == [("a", 0.0), ("c", 1.0)]


def test_releasing_a_claim_notifies_the_listener() -> None:
    told: list[int] = []
    slots = Slots(4)
    slots.notify(lambda: told.append(slots.free))
    slots.claim(6)
    for _ in range(3):
        slots.unclaim(1)
    assert told == [0, 0, 1]
    slots.set_limit(2)
    slots.unclaim(3)
    assert told == [0, 0, 1, 0, 2]


def test_seconds_without_any_sample_are_counted() -> None:
    async def main() -> float:
        slots = Slots(2)
        await asyncio.sleep(5.0)  # before the first sample: not counted
        async with slots.hold():
            await asyncio.sleep(1.0)
        await asyncio.sleep(2.0)
        async with slots.hold(), slots.hold():
            await asyncio.sleep(1.0)
        await asyncio.sleep(0.5)
        return slots.take_idle_s()

    assert run_virtually(main())[0] == 2.5
