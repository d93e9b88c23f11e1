"""When an engine is slow: the rule alone, on given speeds."""

import asyncio
import itertools
import logging
from collections.abc import Mapping

import pytest

from asyncrl.engines.slow_engines import NUM_BELOW, DecodingSpeed, SlowEngines
from tests.virtual_time import run_virtually

Speeds = Mapping[str, tuple[float, int] | None]
"""Tokens per second of all requests, and running requests, by engine."""

_tick = itertools.count(1)


def observed(engines: SlowEngines, speeds: Speeds, times: int = NUM_BELOW, *, is_new: bool = True) -> None:
    """Observe the same speeds several times, measured anew (by a hair another number) or not."""
    for _ in range(times):
        hair = next(_tick) * 1e-9 if is_new else 0.0
        engines.observe(
            {
                url: None if each is None else DecodingSpeed(tokens_per_s=each[0] and each[0] + hair, running=each[1])
                for url, each in speeds.items()
            }
        )


def drained(speeds: Speeds, num_engines: int = 4, *, is_new: bool = True) -> int:
    engines = SlowEngines(0.5, num_engines)
    observed(engines, speeds, 3 * NUM_BELOW, is_new=is_new)
    return engines.num_found


FAST = {"a": (320.0, 32), "b": (300.0, 30), "c": (310.0, 32)}


@pytest.mark.parametrize(
    ("slow", "is_slow"),
    [
        ((32.0, 32), True),
        ((140.0, 32), True),
        ((170.0, 32), False),
        ((60.0, 6), False),  # few requests, each as fast as the others'
        ((330.0, 90), False),  # many requests, each slower, and as many tokens
        ((120.0, 90), True),
        ((3.0, 3), False),  # too few requests to judge
        ((0.0, 32), False),  # it has measured nothing since a pause
        (None, False),
    ],
)
def test_the_speed_is_judged_by_the_load(slow: tuple[float, int] | None, is_slow: bool) -> None:
    engines = SlowEngines(0.5, 4)
    observed(engines, {**FAST, "d": slow}, NUM_BELOW - 1)
    assert engines.num_found == 0
    observed(engines, {**FAST, "d": slow}, 1)
    assert engines.num_found == is_slow


def test_a_speed_that_was_not_measured_again_says_nothing() -> None:
    assert drained({**FAST, "d": (32.0, 32)}, is_new=False) == 0  # all are paused


def test_engines_that_are_idle_while_the_run_waits_are_compared_by_their_last_speed() -> None:
    engines = SlowEngines(0.5, 4)
    observed(engines, {**FAST, "d": (32.0, 32)}, 1)
    observed(engines, {"a": (320.0, 0), "b": (300.0, 0), "c": (310.0, 2), "d": (8.0, 8)}, NUM_BELOW - 1)
    assert engines.num_found == 1


def test_one_observation_above_the_share_begins_the_count_again() -> None:
    engines = SlowEngines(0.5, 4)
    for _ in range(4):
        observed(engines, {**FAST, "d": (32.0, 32)}, NUM_BELOW - 1)
        observed(engines, {**FAST, "d": (290.0, 32)}, 1)
    assert engines.num_found == 0


def test_two_engines_have_no_median() -> None:
    assert drained({"a": (320.0, 32), "b": (10.0, 32)}, num_engines=2) == 0
    assert drained({"a": (320.0, 32), "b": (10.0, 32), "c": None}, num_engines=3) == 0


def test_an_engine_stays_if_half_of_the_engines_would_be_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncrl")
    assert drained({"a": (320.0, 32), "b": (300.0, 32), "c": (32.0, 32)}, num_engines=4) == 0
    (line,) = [record.message for record in caplog.records]
    assert line == (
        "c decodes 1.0 tokens/s per request, and the median of 3 engines is 9.4 (--slow-engine-share 0.5); "
        "it stays, because at least 3 engines must serve"
    )
    assert drained({"a": (320.0, 32), "b": (300.0, 32), "c": (32.0, 32)}, num_engines=3) == 1


def test_the_slowest_of_several_is_drained_first_and_its_past_is_forgotten() -> None:
    async def main() -> str:
        engines, found = SlowEngines(0.5, 7), asyncio.Event()

        async def wait() -> str:
            why = await engines.wait_until_slow("e")
            found.set()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await engines.wait_until_slow("e")
            return why

        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(wait())
            await asyncio.sleep(0)
            observed(engines, {**FAST, "f": (305.0, 31), "g": (305.0, 32), "d": (32.0, 32), "e": (16.0, 32)})
            await found.wait()
        return waiting.result()

    why, _ = run_virtually(main())
    assert why.startswith("decodes 0.5 tokens/s per request, and the median of 7 engines is 9.7")
