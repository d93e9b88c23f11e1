"""Admission counts an open episode as the share of its time in which it holds a slot."""

import asyncio

import pytest

from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.slots import Slots
from tests.virtual_time import run_virtually


def test_the_share_is_that_of_the_time_on_engines_among_the_time_without_waits() -> None:
    async def main() -> None:
        load = EpisodeLoad(8)
        assert load.share == 1.0
        load.open()
        load.change(active=1, held=1)
        await asyncio.sleep(1.0)
        assert load.share == 1.0
        load.change(active=0, held=-1)  # in a tool
        await asyncio.sleep(3.0)
        assert load.share == 0.25
        load.change(active=-1, held=0)  # waits for a slot, or is interrupted
        await asyncio.sleep(100.0)
        assert load.share == 0.25
        load.change(active=1, held=2)  # two calls at once hold two slots
        await asyncio.sleep(4.0)
        assert load.share == 9 / 8

    run_virtually(main())


def test_slots_are_free_as_far_as_episodes_are_not_expected_to_hold_them() -> None:
    async def main() -> None:
        slots = Slots(16, load := EpisodeLoad(1000))
        slots.claim(16)
        load.change(active=16, held=16)
        await asyncio.sleep(1.0)
        assert slots.free == 0
        load.change(active=0, held=-16)
        await asyncio.sleep(3.0)
        assert load.share == 0.25
        reserve = 2 * (16 * 0.75) ** 0.5
        assert slots.free == pytest.approx(16 + reserve - 16 * 0.25, abs=1.0)
        slots.claim(80)
        assert slots.free == 0

    run_virtually(main())


def test_a_first_group_may_start_and_further_ones_as_far_as_max_open_allows() -> None:
    async def main() -> None:
        load = EpisodeLoad(6)
        assert load.has_room(8)
        for _ in range(4):
            load.open()
        assert load.has_room(2)
        assert not load.has_room(3)

    run_virtually(main())


def test_recent_episodes_decide_the_share() -> None:
    async def main() -> None:
        load = EpisodeLoad(8)
        for held in (1, 0):
            for _ in range(2000):
                load.open()
                load.change(active=1, held=held)
                await asyncio.sleep(1.0)
                load.change(active=-1, held=-held)
                load.close()
        assert load.share < 0.01

    run_virtually(main())


def test_slots_without_episodes_have_room_for_any_number() -> None:
    assert Slots(1).has_room(1000)
