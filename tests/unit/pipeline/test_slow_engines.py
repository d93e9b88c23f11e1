"""An engine that decodes far slower than the others is drained and restarted; a healthy fleet is left alone."""

import asyncio
import logging
from functools import partial
from typing import Any

import pytest

from tests.unit.pipeline.fleet import Fleet
from tests.unit.pipeline.harness import World

SLOW_FROM_S = 50.0


def run(
    *, slow: tuple[int, ...] = (), times: float = 10.0, stale: str = "wait", steps: int = 60, seed: int = 0, **about: Any
) -> tuple[World, Fleet]:
    """Run ``steps`` steps; the engines ``slow`` decode ``times`` slower from SLOW_FROM_S on, until they restart."""
    world = World(
        steps=steps,
        groups_per_step=16,
        group_size=8,
        slots=512,
        staleness=2,
        stale=stale,
        lengths=lambda request: 100 + (request.seed + seed) % 900,
        chunk=50,
        train_seconds=2.0,
        max_failed_groups=16,
        make_engine=partial(Fleet, **about),
    )

    async def beneath() -> None:
        fleet: Any = world.engine
        fleet.rejoined = world.updater.rejoined.set
        for number in slow:
            engine = fleet.engines[f"engine-{number}"]
            asyncio.get_running_loop().call_later(SLOW_FROM_S, engine.slow_down, times)
        await fleet.supervisor.keep()

    world.beneath = beneath
    world.run()
    fleet: Any = world.engine
    return world, fleet


def test_a_run_with_an_engine_ten_times_slower_takes_little_longer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncrl.engines")
    import time
    t=time.time()
    healthy, _ = run()
    print(healthy.seconds, time.time()-t)
    world, fleet = run(slow=(1,))
    print(world.seconds, fleet.said, time.time()-t)
    print(caplog.text)
    without,_ = run(slow=(1,), share=0.0)
    print(without.seconds, time.time()-t)
    print(world.facts[-1].scheduler)
    assert 0
