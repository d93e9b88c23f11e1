"""Admission is arithmetic on a snapshot."""

from typing import Any

import pytest

from asyncrl.pipeline.scheduling.acceptance import WINDOW, Acceptance
from asyncrl.pipeline.scheduling.admission import AdmissionState, Limits, assumed_acceptance, is_wanted, may_start


def limits(**changes: Any) -> Limits:
    return Limits(**{"groups_per_step": 4, "group_size": 2, "max_staleness": 1, "num_steps": 100, **changes})


def state(**changes: Any) -> AdmissionState:
    usual = {"batches_taken": 0, "buffered": 0, "in_flight": 0, "engine_step": 0, "free_slots": 1}
    return AdmissionState(**{**usual, **changes})


def room(now: AdmissionState, bounds: Limits) -> int:
    """The number of groups that may start one after the other."""
    started = 0
    while is_wanted(state(**{**_fields(now), "in_flight": now.in_flight + started}), bounds):
        started += 1
    return started


def _fields(now: AdmissionState) -> dict[str, Any]:
    return {name: getattr(now, name) for name in AdmissionState.__dataclass_fields__}


@pytest.mark.parametrize(
    ("now", "bounds", "wanted"),
    [
        (state(), limits(), 8),
        (state(), limits(max_staleness=0), 4),
        (state(in_flight=8), limits(), 0),
        (state(in_flight=3, buffered=5), limits(), 0),
        (state(batches_taken=1, in_flight=4), limits(), 0),
        (state(batches_taken=1, buffered=4, engine_step=1), limits(), 4),
        (state(batches_taken=1, in_flight=3), limits(max_staleness=0), 0),
        (state(batches_taken=99, engine_step=99), limits(), 4),
        (state(batches_taken=100, engine_step=100), limits(), 0),
        (state(acceptance=0.5), limits(), 16),
        (state(acceptance=0.5, buffered=6), limits(), 4),
        (state(acceptance=0.55), limits(), 14),  # 7.7 of them are expected to be kept
        (state(acceptance=0.01, buffered=8), limits(), 0),
    ],
)
def test_as_many_groups_start_as_will_find_a_place_in_time(now: AdmissionState, bounds: Limits, wanted: int) -> None:
    assert room(now, bounds) == wanted


def test_a_group_starts_only_when_a_slot_is_free() -> None:
    assert may_start(state(free_slots=1), limits())
    assert not may_start(state(free_slots=0), limits())


def test_no_group_starts_that_the_buffer_could_not_hold() -> None:
    assert may_start(state(buffered=3, in_flight=1), limits(buffer_size=5))
    assert not may_start(state(buffered=3, in_flight=2), limits(buffer_size=5))
    assert may_start(state(buffered=3, in_flight=2, acceptance=0.5), limits(buffer_size=5))


@pytest.mark.parametrize(
    ("over_sampling", "drops", "assumed"), [(None, False, 0.4), (6, False, 4 / 6), (40, False, 0.4), (6, True, 0.4)]
)
def test_over_sampling_is_capped(over_sampling: int | None, drops: bool, assumed: float) -> None:
    assert assumed_acceptance(0.4, limits(over_sampling=over_sampling), drops=drops) == assumed


def test_where_groups_are_dropped_the_over_sampling_asked_for_is_started_without_a_filter_too() -> None:
    assert assumed_acceptance(1.0, limits(over_sampling=8), drops=True) == 0.5
    assert assumed_acceptance(1.0, limits(over_sampling=8), drops=False) == 1.0


@pytest.mark.parametrize("field", ["groups_per_step", "group_size", "num_steps"])
def test_limits_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        limits(**{field: 0})


@pytest.mark.parametrize("field", ["over_sampling", "buffer_size"])
def test_limits_below_a_batch_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least groups_per_step 4, got 3"):
        limits(**{field: 3})


def test_without_a_rejection_every_group_is_expected_to_be_kept() -> None:
    acceptance = Acceptance()
    assert acceptance.upper == 1.0
    for _ in range(5):
        acceptance.note(True)
    assert acceptance.upper == acceptance.rate == 1.0


def test_the_estimate_is_above_the_rate_and_follows_it() -> None:
    acceptance = Acceptance()
    for verdict in range(WINDOW):
        acceptance.note(verdict % 2 == 0)
    assert acceptance.rate == 0.5
    assert 0.5 < acceptance.upper < 0.57
    for _ in range(WINDOW):
        acceptance.note(False)
    assert acceptance.rate == 0.0
    assert 0.0 < acceptance.upper < 0.02
