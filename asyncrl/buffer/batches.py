"""In which order finished groups are trained.  Pure arithmetic on dispatch order and deadlines; it never waits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Due:
    """A group and the last step that may train on it.  Deadlines never fall as group ids grow."""

    group_id: GroupId
    deadline: int


def choose(finished: Iterable[Due], unfinished: Iterable[Due], *, step: int, size: int) -> tuple[GroupId, ...] | None:
    """The ``size`` oldest finished groups, or None while taking them now would break a deadline later.

    A finished group may overtake an unfinished older one only while the groups left behind can still all be trained in
    time: ``size`` of them at each step after this one, the tightest deadline first.  Otherwise the caller waits for the
    unfinished ones, which keeps the choice free of a preference for short answers.
    """
    oldest = sorted(finished)
    if len(oldest) < size:
        return None
    chosen, left = oldest[:size], [*oldest[size:], *unfinished]
    return tuple(due.group_id for due in chosen) if all_in_time(left, step=step + 1, size=size) else None


def all_in_time(waiting: Sequence[Due], *, step: int, size: int) -> bool:
    """Whether groups trained ``size`` per step from ``step`` on, tightest deadline first, all meet their deadlines."""
    deadlines = sorted(due.deadline for due in waiting)
    return all(deadline >= step + place // size for place, deadline in enumerate(deadlines))
