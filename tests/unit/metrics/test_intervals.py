"""Unions of time intervals that overlap."""

from asyncrl.metrics.intervals import clipped, seconds, union, without


def test_a_union_counts_nothing_twice() -> None:
    assert union([(3, 4), (0, 2), (1, 2.5), (2.5, 3)]) == [(0, 4)]
    assert seconds(union([(0, 2), (1, 3), (5, 6)])) == 4
    assert clipped([(0, 2), (3, 9), (9, 10)], 1, 5) == [(1, 2), (3, 5)]
    assert without([(0, 4), (3, 6)], [(1, 2), (5, 9), (1, 1.5)]) == [(0, 1), (2, 5)]
