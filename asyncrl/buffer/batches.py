"""In which order finished groups are trained, and which groups never can be.  Pure arithmetic; it never waits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from asyncrl.types import GroupId

_order = attrgetter("order")
"""Sorting by it is ten times as fast as comparing the values themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A group and the last step that may train on it.  Deadlines never fall as ``order`` grows."""

    order: int
    """Of dispatch; no two groups share one."""
    deadline: int
    group_id: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """No batch can be cut, and none can until a group with at most this deadline is done."""

    deadline: float
    """Infinite when there are too few finished groups, whichever."""


def oldest(finished: Iterable[Due], *, size: int) -> tuple[Due, ...] | NotYet:
    """The ``size`` oldest finished groups, whatever is unfinished."""
    chosen = tuple(sorted(finished, key=_order)[:size])
    return chosen if len(chosen) == size else NotYet(deadline=float("inf"))


def oldest_in_time(
    finished: Sequence[Due], unfinished: Iterable[Due], *, step: int, size: int
) -> tuple[Due, ...] | NotYet:
    """The ``size`` oldest finished groups, unless taking them now would make an older unfinished one miss its deadline.

    A finished group may overtake an unfinished older one only while the groups left behind can still all be trained in
    time: ``size`` of them at each step after this one, the tightest deadline first.  Otherwise the caller waits for the
    unfinished ones, which keeps the choice free of a preference for short answers.  Groups beyond what the steps can
    hold (a filter may reject some before them) have no claim.
    """
    chosen = oldest(finished, size=size)
    if isinstance(chosen, NotYet):
        return chosen
    taken = {due.order for due in chosen}
    left = (due for due in with_a_place((*finished, *unfinished), step=step, size=size) if due.order not in taken)
    for place, due in enumerate(left):
        if due.deadline < step + 1 + place // size:
            return NotYet(deadline=due.deadline)
    return chosen


def with_a_place(waiting: Iterable[Due], *, step: int, size: int) -> list[Due]:
    """Those that can be trained in time, ``size`` per step from ``step`` on, when the older ones go first."""
    places: list[Due] = []
    for due in sorted(waiting, key=_order):
        if due.deadline >= step + len(places) // size:
            places.append(due)
    return places


def doomed(finished: Iterable[Due], unfinished: Iterable[Due], *, step: int, size: int) -> tuple[Due, ...]:
    """Groups that no step from ``step`` on can train in time, whatever happens: finished older ones fill every place.

    Unfinished ones fill none, as a filter may yet reject them.
    """
    is_finished = {due.order for due in finished}
    places, lost = 0, list[Due]()
    for due in sorted((*finished, *unfinished), key=_order):
        if due.deadline < step + places // size:
            lost.append(due)
        elif due.order in is_finished:
            places += 1
    return tuple(lost)
