"""Distributions of lengths."""

import pytest

from asyncrl.sim.model.lengths import Drawn, LogNormal, Moments, Observed, Pareto, Replayed


def test_a_log_normal_has_the_median_and_the_95th_percentile_asked_for() -> None:
    shape = LogNormal(median=1000, p95_ratio=8)
    assert shape.at(0.5) == pytest.approx(1000)
    assert shape.at(0.95) == pytest.approx(8000)


def test_a_pareto_tail_falls_as_a_power() -> None:
    shape = Pareto(median=1000, exponent=2)
    assert shape.at(0.5) == pytest.approx(1000)
    assert shape.at(1 - 0.5 / 9) == pytest.approx(3000)  # nine times rarer at three times the length


def test_draws_repeat_and_follow_the_distribution() -> None:
    drawn = Drawn(shape=LogNormal(median=1000, p95_ratio=8), cut=16_000)
    lengths = [drawn.tokens(row, index) for row in range(500) for index in range(4)]
    assert lengths == [drawn.tokens(row, index) for row in range(500) for index in range(4)]
    assert max(lengths) == 16_000
    assert sorted(lengths)[1000] == pytest.approx(1000, rel=0.1)
    assert sum(lengths) / 2000 == pytest.approx(drawn.moments().mean, rel=0.1)
    assert lengths != [drawn.with_seed(1).tokens(row, index) for row in range(500) for index in range(4)]


def test_a_running_answer_is_longer_than_the_mean_suggests() -> None:
    # Of one answer of 10 and one of 30 tokens, running ones have written 5 and 15, for 10 and 30 of 40 moments.
    assert Moments.of([10, 30]) == Moments(mean=20, mean_running=(10 * 5 + 30 * 15) / 40, longest=30)


def test_a_replay_has_the_lengths_of_the_run_and_draws_the_rest_from_them() -> None:
    lengths = Replayed(known={(0, 0): 7}, rest=Drawn(shape=Observed(sorted_tokens=(3, 4, 5)), cut=5))
    assert lengths.tokens(0, 0) == 7
    assert {lengths.tokens(row, 0) for row in range(1, 40)} == {3, 4, 5}
