"""A plain implementation of ``asyncrl.buffer.batches``: lists of all groups, scanned at each call."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from asyncrl.buffer import Due

_order = attrgetter("order")


def oldest(finished: Iterable[Due], *, size: int) -> list[Due] | None:
    """The ``size`` oldest groups; None if there are fewer."""
    chosen = sorted(finished, key=_order)[:size]
    return chosen if len(chosen) == size else None


def first_late(finished: Sequence[Due], unfinished: Iterable[Due], *, step: int, size: int) -> int | None:
    """The first missed deadline if the oldest finished groups are trained now, and the others in order."""
    taken = {due.order for due in sorted(finished, key=_order)[:size]}
    left = (due for due in with_a_place((*finished, *unfinished), step=step, size=size) if due.order not in taken)
    return next((due.deadline for place, due in enumerate(left) if due.deadline < step + 1 + place // size), None)


def with_a_place(waiting: Iterable[Due], *, step: int, size: int) -> list[Due]:
    """The groups that can be trained in time, ``size`` per step from ``step`` on, the oldest first."""
    places: list[Due] = []
    for due in sorted(waiting, key=_order):
        if due.deadline >= step + len(places) // size:
            places.append(due)
    return places


def doomed(finished: Iterable[Due], unfinished: Iterable[Due], *, step: int, size: int) -> list[Due]:
    """The groups for which older finished ones leave no place before their deadline."""
    is_finished = {due.order for due in finished}
    places, lost = 0, list[Due]()
    for due in sorted((*finished, *unfinished), key=_order):
        if due.deadline < step + places // size:
            lost.append(due)
        elif due.order in is_finished:
            places += 1
    return lost
