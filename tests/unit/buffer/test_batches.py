"""The order of batches, and the groups that cannot be trained in time."""

import random
from collections.abc import Iterable
from itertools import accumulate

import pytest

from asyncrl.buffer import Dispatch, NotYet, Outstanding
from asyncrl.types import GroupId
from tests.unit.buffer import plain_batches


def dispatch(order: int, deadline: int) -> Dispatch:
    return Dispatch(order=order, deadline=deadline, group_id=GroupId(order))


def outstanding(finished: Iterable[Dispatch], unfinished: Iterable[Dispatch] = ()) -> Outstanding:
    """Groups that started in order; the finished ones finished youngest first."""
    groups, ready = Outstanding(), list(finished)
    for each in sorted((*ready, *unfinished), key=lambda each: each.order):
        groups.start(each)
    for each in sorted(ready, key=lambda each: -each.order):
        groups.finish(each)
    return groups


def ids(dispatches: Iterable[Dispatch] | NotYet) -> list[int]:
    assert not isinstance(dispatches, NotYet)
    return [dispatch.order for dispatch in dispatches]


def test_the_oldest_finished_groups_go_first() -> None:
    groups = outstanding([dispatch(3, 1), dispatch(0, 1), dispatch(2, 1)], [dispatch(1, 1)])
    assert ids(groups.oldest_in_time(step=0, size=2)) == [0, 2]
    assert ids(groups.oldest(size=2)) == [0, 2]
    assert ids(groups.finished()) == [0, 2, 3]


def test_a_batch_waits_for_a_group_that_is_due_now() -> None:
    groups = outstanding([dispatch(1, 5), dispatch(2, 5)], [dispatch(0, 0)])
    assert groups.oldest_in_time(step=0, size=2) == NotYet(deadline=0, missing=1)
    assert ids(groups.oldest(size=2)) == [1, 2]


def test_a_batch_waits_when_too_many_groups_would_be_due_at_one_step() -> None:
    finished, left = [dispatch(3, 2), dispatch(4, 2)], [dispatch(0, 1), dispatch(1, 1), dispatch(2, 1)]
    assert outstanding(finished, left).oldest_in_time(step=0, size=2) == NotYet(deadline=1, missing=1)
    assert ids(outstanding(finished, left[:2]).oldest_in_time(step=0, size=2)) == [3, 4]


def test_too_few_finished_groups_make_no_batch() -> None:
    nothing = NotYet(deadline=float("inf"), missing=2)
    assert outstanding([dispatch(0, 9)]).oldest_in_time(step=0, size=3) == nothing
    assert outstanding([dispatch(0, 9)]).oldest(size=3) == nothing


def test_groups_beyond_what_the_steps_can_hold_have_no_claim() -> None:
    surplus = [dispatch(order, 0) for order in range(6)]  # due now, four too many
    assert ids(outstanding(surplus[:2], surplus[2:]).oldest_in_time(step=0, size=2)) == [0, 1]
    late = outstanding(surplus[1:3], [surplus[0], *surplus[3:]])
    assert late.oldest_in_time(step=0, size=2) == NotYet(deadline=0, missing=1)


def test_a_group_past_its_deadline_is_doomed() -> None:
    groups = outstanding([dispatch(0, 1)], [dispatch(1, 1), dispatch(2, 2)])
    assert ids(groups.doomed(step=2, size=2)) == ids(groups.overdue(step=2)) == [0, 1]


def test_groups_without_a_place_behind_finished_older_ones_are_doomed() -> None:
    groups = outstanding([dispatch(0, 1), dispatch(1, 1), dispatch(3, 1)], [dispatch(2, 1), dispatch(4, 2)])
    assert ids(groups.doomed(step=1, size=2)) == [2, 3]
    assert ids(groups.overdue(step=1)) == []


def test_groups_behind_unfinished_older_ones_are_not_doomed() -> None:
    assert outstanding([dispatch(3, 1)], [dispatch(0, 1), dispatch(1, 1), dispatch(2, 1)]).doomed(step=1, size=2) == ()


def test_unfinished_groups_are_counted_until_they_are_overdue() -> None:
    groups = outstanding([dispatch(0, 0), dispatch(2, 1)], [dispatch(1, 0), dispatch(3, 1), dispatch(4, 1)])
    assert [groups.num_unfinished(step) for step in (0, 1, 2)] == [3, 2, 0]
    groups.remove(dispatch(3, 1))
    groups.finish(dispatch(4, 1))
    assert [groups.num_unfinished(step) for step in (0, 1, 2)] == [1, 0, 0]


def test_deadlines_that_fall_are_a_bug() -> None:
    with pytest.raises(ValueError, match="deadlines fall"):
        outstanding([], [dispatch(0, 2), dispatch(1, 1)])


@pytest.mark.parametrize("seed", range(300))
def test_counting_by_deadline_agrees_with_a_scan_of_all_groups(seed: int) -> None:
    rng = random.Random(seed)
    size, num_groups = rng.randint(1, 4), rng.randint(0, 30)
    deadlines = accumulate(rng.choices((0, 1, 2), weights=(rng.randint(1, 8), 2, 1), k=num_groups))
    dispatches = [dispatch(order, deadline) for order, deadline in enumerate(deadlines)]
    finished = [each for each in dispatches if rng.random() < rng.choice((0.2, 0.5, 0.9))]
    unfinished = [each for each in dispatches if each not in finished]
    groups = outstanding(finished, unfinished)
    for gone in rng.sample(dispatches, k=num_groups // 4):
        groups.remove(gone)
        (finished if gone in finished else unfinished).remove(gone)
    for step in range(4):
        assert_like_plain(groups, finished, unfinished, step, size)


def assert_like_plain(
    groups: Outstanding, finished: list[Dispatch], unfinished: list[Dispatch], step: int, size: int
) -> None:
    plain = plain_batches.oldest(finished, size=size)
    late = plain_batches.first_late(finished, unfinished, step=step, size=size)
    assert groups.num_finished == len(finished)
    assert groups.doomed(step=step, size=size) == tuple(
        plain_batches.doomed(finished, unfinished, step=step, size=size)
    )
    assert list(groups.overdue(step=step)) == plain_batches.doomed([], [*finished, *unfinished], step=step, size=size)
    found = groups.oldest_in_time(step=step, size=size)
    if plain is None:
        assert found == groups.oldest(size=size) == NotYet(deadline=float("inf"), missing=size - len(finished))
    elif late is None:
        assert ids(found) == ids(groups.oldest(size=size)) == ids(plain)
    else:
        assert isinstance(found, NotYet)
        assert found.deadline == late
        if not groups.doomed(step=step, size=size):  # doomed groups are dropped before any batch waits
            assert_nothing_less_helps(found, finished, unfinished, step, size)


def assert_nothing_less_helps(
    found: NotYet, finished: list[Dispatch], unfinished: list[Dispatch], step: int, size: int
) -> None:
    """Assert that no batch is possible when fewer than ``missing`` groups with that deadline end, whichever end."""
    rng, late = random.Random(step), [each for each in unfinished if each.deadline <= found.deadline]
    assert len(late) >= found.missing >= 1
    for _ in range(5):
        ended = rng.sample(late, k=found.missing - 1)
        kept = [each for each in ended if rng.random() < 0.5]
        left = [each for each in unfinished if each not in ended]
        assert plain_batches.first_late([*finished, *kept], left, step=step, size=size) is not None
