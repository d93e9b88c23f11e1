"""A plain implementation of ``asyncrl.buffer.batches``: lists of all groups, scanned at each call."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

from asyncrl.buffer import Dispatch

_order = attrgetter("order")


def oldest(finished: Iterable[Dispatch], *, size: int) -> list[Dispatch] | None:
    """The ``size`` oldest groups; None if there are fewer."""
    chosen = sorted(finished, key=_order)[:size]
    return chosen if len(chosen) == size else None


def first_late(finished: Sequence[Dispatch], unfinished: Iterable[Dispatch], *, step: int, size: int) -> int | None:
    """The first missed deadline if the oldest finished groups are trained now, and the others in order."""
    taken = {dispatch.order for dispatch in sorted(finished, key=_order)[:size]}
    left = (
        dispatch
        for dispatch in with_a_place((*finished, *unfinished), step=step, size=size)
        if dispatch.order not in taken
    )
    return next(
        (dispatch.deadline for place, dispatch in enumerate(left) if dispatch.deadline < step + 1 + place // size), None
    )


def with_a_place(waiting: Iterable[Dispatch], *, step: int, size: int) -> list[Dispatch]:
    """The groups that can be trained in time, ``size`` per step from ``step`` on, the oldest first."""
    places: list[Dispatch] = []
    for dispatch in sorted(waiting, key=_order):
        if dispatch.deadline >= step + len(places) // size:
            places.append(dispatch)
    return places


def doomed(finished: Iterable[Dispatch], unfinished: Iterable[Dispatch], *, step: int, size: int) -> list[Dispatch]:
    """The groups for which older finished ones leave no place before their deadline."""
    is_finished = {dispatch.order for dispatch in finished}
    places, lost = 0, list[Dispatch]()
    for dispatch in sorted((*finished, *unfinished), key=_order):
        if dispatch.deadline < step + places // size:
            lost.append(dispatch)
        elif dispatch.order in is_finished:
            places += 1
    return lost
