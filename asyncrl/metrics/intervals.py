"""Arithmetic on intervals of time."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and stop, in seconds."""


def clipped(intervals: Iterable[Interval], start_s: float, stop_s: float) -> list[Interval]:
    """The parts of ``intervals`` between ``start_s`` and ``stop_s``."""
    parts = ((max(start, start_s), min(stop, stop_s)) for start, stop in intervals)
    return [(start, stop) for start, stop in parts if start < stop]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time covered by ``intervals``, as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def without(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """The union of ``intervals`` minus that of ``holes``."""
    left = union(intervals)
    for begin, end in union(holes):
        left = [
            part
            for start, stop in left
            for part in ((start, min(stop, begin)), (max(start, end), stop))
            if part[0] < part[1]
        ]
    return left


def seconds(intervals: Sequence[Interval]) -> float:
    """The sum of the lengths, in seconds."""
    return sum(stop - start for start, stop in intervals)
