"""The measurement of scale, on a small fleet: it is full, stops in time, and reports slowness."""

import gc
import time
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.sim.model.world import simulate
from asyncrl.sim.search.scale import Scaled, full_fleet, measure
from asyncrl.sim.search.targets import scale_verdicts

SEEN = Scaled(
    num_engines=2,
    num_slots=200,
    num_steps=2,
    in_flight=(199, 200),
    decoding=195.0,
    samples=400,
    simulated_s=300.0,
    wall_s=100.0,
    cpu_s=50.0,
)


def test_a_small_fleet_is_full_and_measured_until_the_end_of_its_last_step() -> None:
    started = time.perf_counter()
    seen = measure(full_fleet(2, 2))
    assert seen.wall_s < time.perf_counter() - started
    assert (seen.num_slots, seen.in_flight, seen.samples) == (200, (200, 200), 400)
    assert [verdict.holds for verdict in scale_verdicts(seen)] == [True, True, True]
    whole = simulate(full_fleet(2, 2))
    assert seen.simulated_s == pytest.approx(sum(whole.step_times_s))
    assert seen.decoding == pytest.approx(whole.slots_filled * 200)


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    measure(full_fleet(1, 1))
    assert gc.isenabled()


@pytest.mark.parametrize("changed", [{"in_flight": (197, 200)}, {"decoding": 180.0}, {"wall_s": 301.0}])
def test_each_target_can_fail(changed: dict[str, Any]) -> None:
    assert all(verdict.holds for verdict in scale_verdicts(SEEN))
    assert [verdict.holds for verdict in scale_verdicts(replace(SEEN, **changed))].count(False) == 1
