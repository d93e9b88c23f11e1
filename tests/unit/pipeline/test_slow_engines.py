"""An engine that decodes far slower than the others is drained and restarted; a healthy fleet is left alone."""

import asyncio
import logging
from functools import partial
from typing import Any

import pytest

from asyncrl.types import SamplingParams
from tests.unit.pipeline.fleet import Fleet
from tests.unit.pipeline.harness import World

SLOW_FROM_S = 50.0
TIMES = 10.0


def run(*, slow: tuple[int, ...] = (), steps: int = 60, world: dict[str, Any] | None = None, **fleet: Any) -> World:
    """Run ``steps`` steps; the engines ``slow`` decode TIMES slower from SLOW_FROM_S on, until they restart.

    ``world`` has further settings of the World, and ``fleet`` of the Fleet.
    """
    run = World(
        **{
            "steps": steps,
            "groups_per_step": 8,
            "slots": 128,
            "staleness": 2,
            "lengths": lambda request: 10 + request.seed % 90,
            "chunk": 5,
            "seconds_per_token": 0.1,
            "train_seconds": 2.0,
            "make_engine": partial(Fleet, **fleet),
            **(world or {}),
        }
    )

    async def beneath() -> None:
        run.engine.rejoined = run.updater.rejoined.set
        for number in slow:
            engine = run.engine.engines[f"engine-{number}"]
            asyncio.get_running_loop().call_later(SLOW_FROM_S, engine.slow_down, TIMES)
        await run.engine.supervisor.keep()

    run.beneath = beneath
    return run.run()


def test_a_run_with_an_engine_ten_times_slower_takes_little_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Without the remedy it takes 6.3 times as long."""
    caplog.set_level(logging.WARNING, "asyncrl")
    healthy, ill = run(), run(slow=(1,))
    assert ill.seconds < 1.5 * healthy.seconds
    assert ill.engine.said == ["engine-1 leaves", "engine-1 is drained", "engine-1 joins"]
    assert ill.engine.supervisor.num_slow == 1
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("engine-1 decodes 0.9 tokens/s per request, and the median of 4 engines is ")
    assert line.endswith("its requests continue on other engines; restarting it (restart 1 of at most 3 an hour)")
    assert max(ill.lags) <= 2


def test_the_stragglers_of_a_slow_engine_keep_their_tokens_and_count_once() -> None:
    run_ = run(slow=(1,))
    last = run_.facts[-1].scheduler
    assert (last.retries, last.groups.failed, last.groups.stale) == (0, 0, 0)
    assert last.aborts > 0
    assert last.tokens.generated == last.tokens.trained
    wanted = {
        (group.group_id, place): 10 + scored.sample.seed % 90
        for batch in run_.trainer.batches
        for group in batch.groups
        for place, scored in enumerate(group.samples)
    }
    assert wanted


@pytest.mark.parametrize("seed", range(3))
def test_engines_of_uneven_speed_are_left_alone(seed: int) -> None:
    """Also in evaluations, and with measurements that are off by up to 30 %."""
    world = {
        "lengths": lambda request: 5 + (request.seed + seed) % 150,
        "held_out_sets": {"held": (4, 4, SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=400))},
        "eval_interval": 5,
    }
    healthy = run(steps=40, world=world, speeds=(1.0, 0.8, 1.2, 0.9), seed=seed)
    assert healthy.engine.said == []
    assert healthy.seconds > 120.0


@pytest.mark.parametrize(
    ("slow", "about"),
    [
        ((0, 1, 2, 3), {}),  # all alike
        ((1,), {"speeds": (1.0, 1.0)}),  # two engines have no median
        ((1,), {"share": 0.0}),
    ],
)
def test_no_engine_is_drained(slow: tuple[int, ...], about: dict[str, Any]) -> None:
    ill = run(slow=slow, steps=20, **about)
    assert ill.engine.said == []
    assert ill.seconds > 200.0
