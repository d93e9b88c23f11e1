"""The order of batches, and what cannot be trained in time any more."""

from asyncrl.buffer import Due, NotYet, doomed, oldest, oldest_in_time, with_a_place
from asyncrl.types import GroupId


def due(order: int, deadline: int) -> Due:
    return Due(order=order, deadline=deadline, group_id=GroupId(order))


def ids(dues: tuple[Due, ...] | list[Due] | NotYet) -> list[int]:
    assert not isinstance(dues, NotYet)
    return [due.order for due in dues]


def test_the_oldest_finished_groups_go_first() -> None:
    finished = [due(3, 1), due(0, 1), due(2, 1)]
    assert ids(oldest_in_time(finished, [due(1, 1)], step=0, size=2)) == [0, 2]
    assert ids(oldest(finished, size=2)) == [0, 2]


def test_a_batch_waits_for_a_group_that_is_due_now() -> None:
    waits = oldest_in_time([due(1, 5), due(2, 5)], [due(0, 0)], step=0, size=2)
    assert waits == NotYet(deadline=0)


def test_a_batch_waits_when_too_many_groups_would_be_due_at_one_step() -> None:
    left = [due(0, 1), due(1, 1), due(2, 1)]
    assert oldest_in_time([due(3, 2), due(4, 2)], left, step=0, size=2) == NotYet(deadline=1)
    assert ids(oldest_in_time([due(3, 2), due(4, 2)], left[:2], step=0, size=2)) == [3, 4]


def test_too_few_finished_groups_make_no_batch() -> None:
    assert oldest_in_time([due(0, 9)], [], step=0, size=2) == NotYet(deadline=float("inf"))


def test_groups_beyond_what_the_steps_can_hold_have_no_claim() -> None:
    surplus = [due(order, 0) for order in range(6)]  # due now, four too many
    assert ids(with_a_place(surplus, step=0, size=2)) == [0, 1]
    assert ids(oldest_in_time(surplus[:2], surplus[2:], step=0, size=2)) == [0, 1]
    assert oldest_in_time(surplus[1:3], [surplus[0], *surplus[3:]], step=0, size=2) == NotYet(deadline=0)


def test_what_is_past_its_deadline_is_doomed() -> None:
    assert ids(doomed([due(0, 1)], [due(1, 1), due(2, 2)], step=2, size=2)) == [0, 1]


def test_what_finished_older_groups_leave_no_place_for_is_doomed() -> None:
    finished = [due(0, 1), due(1, 1), due(3, 1)]
    assert ids(doomed(finished, [due(2, 1), due(4, 2)], step=1, size=2)) == [2, 3]


def test_what_unfinished_older_groups_may_yet_leave_a_place_for_is_not() -> None:
    assert doomed([due(3, 1)], [due(0, 1), due(1, 1), due(2, 1)], step=1, size=2) == ()
