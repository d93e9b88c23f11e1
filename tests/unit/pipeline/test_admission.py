"""Admission is arithmetic; over random histories, no group is ever older than the bound."""

import random

import pytest

from asyncrl.buffer import Due, all_in_time, choose
from asyncrl.pipeline.admission import Limits, Standing, groups_wanted, may_start
from asyncrl.types import GroupId


def limits(**changes: int) -> Limits:
    usual = {"groups_per_step": 4, "group_size": 2, "max_staleness": 1, "num_steps": 100, "slots": 8}
    return Limits(**{**usual, **changes})


def standing(**changes: int) -> Standing:
    return Standing(**{"batches_taken": 0, "outstanding": 0, "engine_step": 0, "free_slots": 1, **changes})


@pytest.mark.parametrize(
    ("now", "bounds", "wanted"),
    [
        (standing(), limits(), 8),
        (standing(), limits(max_staleness=0), 4),
        (standing(outstanding=8), limits(), 0),
        (standing(batches_taken=1, outstanding=4), limits(), 0),
        (standing(batches_taken=1, outstanding=4, engine_step=1), limits(), 4),
        (standing(batches_taken=1, outstanding=3), limits(max_staleness=0), 0),
        (standing(batches_taken=99, engine_step=99), limits(), 4),
        (standing(batches_taken=100, engine_step=100), limits(), 0),
    ],
)
def test_groups_wanted_keeps_every_group_within_the_bound(now: Standing, bounds: Limits, wanted: int) -> None:
    assert groups_wanted(now, bounds) == wanted


def test_a_group_starts_only_when_a_slot_is_free() -> None:
    assert may_start(standing(free_slots=1), limits())
    assert not may_start(standing(free_slots=0), limits())


@pytest.mark.parametrize("field", ["groups_per_step", "group_size", "num_steps", "slots"])
def test_limits_below_one_are_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        limits(**{field: 0})


def due(group_id: int, deadline: int) -> Due:
    return Due(group_id=GroupId(group_id), deadline=deadline)


def test_the_oldest_finished_groups_go_first() -> None:
    finished = [due(3, 1), due(0, 1), due(2, 1)]
    assert choose(finished, [due(1, 1)], step=0, size=2) == (0, 2)


def test_a_batch_waits_for_a_group_that_is_due_now() -> None:
    assert choose([due(1, 5), due(2, 5)], [due(0, 0)], step=0, size=2) is None


def test_a_batch_waits_when_too_many_groups_would_be_due_at_one_step() -> None:
    left = [due(0, 1), due(1, 1), due(2, 1)]
    assert choose([due(3, 2), due(4, 2)], left, step=0, size=2) is None
    assert choose([due(3, 2), due(4, 2)], left[:2], step=0, size=2) == (3, 4)


def test_too_few_finished_groups_make_no_batch() -> None:
    assert choose([due(0, 9)], [], step=0, size=2) is None


def test_over_random_histories_no_group_is_trained_late_and_every_batch_comes() -> None:
    for seed in range(200):
        live_through(random.Random(seed))


def live_through(rng: random.Random) -> None:
    """Groups start, finish, fail and are trained in random order, to the last step."""
    interval = rng.randint(1, 4)
    bounds = limits(
        groups_per_step=rng.randint(1, 5),
        max_staleness=rng.randint(interval - 1, interval + 3),
        num_steps=25,
        slots=1000,
    )
    engine_step, finished, unfinished, next_id = 0, set[Due](), set[Due](), 0
    step = 0
    while step < bounds.num_steps:
        now = standing(batches_taken=step, outstanding=len(finished | unfinished), engine_step=engine_step)
        if groups_wanted(now, bounds) and rng.random() < 0.6:
            unfinished.add(due(next_id, engine_step + bounds.max_staleness))
            next_id += 1
        elif unfinished and rng.random() < 0.7:
            group = rng.choice(sorted(unfinished))
            unfinished.remove(group)
            if rng.random() < 0.8:  # the others are filtered or fail
                finished.add(group)
        chosen = choose(finished, unfinished, step=step, size=bounds.groups_per_step)
        assert all_in_time([*finished, *unfinished], step=step, size=bounds.groups_per_step)
        if chosen is not None:
            batch = {group for group in finished if group.group_id in chosen}
            assert all(group.deadline >= step for group in batch)
            finished -= batch
            step += 1
            if step % interval == 0:
                engine_step = step
