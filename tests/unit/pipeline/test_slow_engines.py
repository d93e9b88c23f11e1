"""An engine that decodes far slower than the others is drained and restarted; a healthy fleet is left alone."""

import asyncio
import logging
from functools import partial
from typing import Any

import pytest

from asyncrl.types import Request, SamplingParams
from tests.unit.pipeline.fleet import Fleet
from tests.unit.pipeline.harness import World

SLOW_FROM_S = 50.0
TIMES = 10.0


def already(request: Request) -> int:
    """Tokens of the answer that an earlier attempt has generated."""
    return len(request.token_ids) - 3


def run(*, slow: tuple[int, ...] = (), steps: int = 20, world: dict[str, Any] | None = None, **fleet: Any) -> World:
    """Run ``steps`` steps; the engines ``slow`` decode TIMES slower from SLOW_FROM_S on, until they restart.

    ``world`` has further settings of the World, and ``fleet`` of the Fleet.
    """
    run = World(
        **{
            "steps": steps,
            "groups_per_step": 8,
            "group_size": 4,
            "slots": 128,
            "staleness": 2,
            "lengths": lambda request: 10 + request.seed % 90 - already(request),
            "chunk": 5,
            "seconds_per_token": 0.1,
            "train_seconds": 2.0,
            "make_engine": partial(Fleet, **fleet),
            **(world or {}),
        }
    )

    async def beneath() -> None:
        fleet = fleet_of(run)
        fleet.rejoined = run.updater.rejoined.set
        for number in slow:
            engine = fleet.engines[f"engine-{number}"]
            asyncio.get_running_loop().call_later(SLOW_FROM_S, engine.slow_down, TIMES)
        await fleet.supervisor.keep()

    run.beneath = beneath
    return run.run()


def fleet_of(run: World) -> Fleet:
    engine: Any = run.engine
    return engine  # type: ignore[no-any-return]


def test_a_run_with_an_engine_ten_times_slower_takes_little_longer(caplog: pytest.LogCaptureFixture) -> None:
    """Without the remedy it takes 6.3 times as long."""
    caplog.set_level(logging.WARNING, "asyncrl")
    healthy, ill = run(steps=45), run(steps=45, slow=(1,))
    assert ill.seconds < 1.5 * healthy.seconds
    assert fleet_of(ill).said == ["engine-1 leaves", "engine-1 is drained", "engine-1 joins"]
    assert fleet_of(ill).supervisor.num_slow == 1
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("engine-1 decodes 0.")
    assert "tokens/s per request, and the median of 4 engines is " in line
    assert line.endswith("its requests continue on other engines; restarting it (restart 1 of at most 3 an hour)")
    check_that_nothing_is_lost(ill, healthy)


def check_that_nothing_is_lost(ill: World, healthy: World) -> None:
    """The stragglers of the slow engine kept their tokens, count once, and end as on a healthy one."""
    last = ill.facts[-1].scheduler
    assert (last.retries, last.groups.failed, last.groups.stale) == (0, 0, 0)
    assert last.aborts > 0
    assert last.tokens.generated == last.tokens.trained
    assert max(ill.lags) <= 2
    assert answers(ill) == answers(healthy)


def answers(run: World) -> dict[int, list[tuple[int, ...]]]:
    """The trained tokens by row; the fake engine draws them by seed and place, whatever the weights."""
    return {
        group.prompt.row: [scored.sample.token_ids for scored in group.samples]
        for batch in run.trainer.batches
        for group in batch.groups
    }


@pytest.mark.parametrize("seed", range(3))
def test_engines_of_uneven_speed_are_left_alone(seed: int) -> None:
    """Also in evaluations, and with measurements that are off by up to 30 %."""
    world = {
        "lengths": lambda request: 5 + (request.seed + seed) % 150 - already(request),
        "held_out_sets": {"held": (4, 4, SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=400))},
        "eval_interval": 5,
    }
    healthy = run(world=world, speeds=(1.0, 0.8, 1.2, 0.9), seed=seed)
    assert fleet_of(healthy).said == []
    assert healthy.seconds > 100.0


@pytest.mark.parametrize(
    ("slow", "about"),
    [
        ((0, 1, 2, 3), {}),  # all alike
        ((1,), {"speeds": (1.0, 1.0)}),  # two engines have no median
        ((1,), {"share": 0.0}),
    ],
)
def test_no_engine_is_drained(slow: tuple[int, ...], about: dict[str, Any]) -> None:
    ill = run(slow=slow, **about)
    assert fleet_of(ill).said == []
    assert ill.seconds > 200.0
