import math
import random
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import pytest

from asyncrl.metrics.length_bias import ALPHA, HALF_LIFE_STEPS, MARGIN, LengthBias
from asyncrl.metrics.life_table import bucket_of, life_table
from tests.unit.metrics.length_histories import GROUPS_PER_STEP, Group, History

SEEDS = range(3)


def fails_at_the_end(draw: random.Random, group: Group) -> bool:
    return group.is_done and draw.random() < 0.2


def is_doomed_at_any_age(draw: random.Random) -> int | None:
    return int(draw.expovariate(1 / 600)) + 1 if draw.random() < 0.2 else None


def is_too_long(limit: int) -> Callable[[random.Random, Group], bool]:
    return lambda _draw, group: group.age >= limit and not group.is_done


def test_without_losses_there_is_no_bias_however_many_long_samples_are_in_flight() -> None:
    history = History(0, drift_per_step=1.01)
    for stats in history.run(40):
        assert stats.bias == 0.0
        assert stats.mean_ratio == 1.0
        assert stats.alarm is None


def test_losses_that_do_not_depend_on_length_raise_no_alarm() -> None:
    for seed in SEEDS:
        of_prompt = (seed % 3) / 2  # samples of a group: independent, half alike, all alike
        for history in (
            History(seed, is_lost=fails_at_the_end, of_prompt=of_prompt),
            History(seed, doom=is_doomed_at_any_age, of_prompt=of_prompt),
        ):
            seen = history.run(40)
            assert [stats.alarm for stats in seen if stats.alarm] == []
            assert seen[-1].cut + seen[-1].dropped > 300  # there was something to be alarmed about


def test_samples_dropped_by_a_users_filter_are_no_bias_of_the_scheduler() -> None:
    history = History(0, is_filtered=lambda _draw, group: max(group.lengths) > 1500)
    stats = history.run(40)[-1]
    assert stats.filtered > 500
    assert (stats.bias, stats.alarm) == (0.0, None)


@pytest.mark.parametrize(("limit", "ratio"), [(1600, 0.65), (4000, 0.85)])
def test_losing_the_longest_raises_the_alarm(limit: int, ratio: float) -> None:
    for seed in SEEDS:
        stats = History(seed, is_lost=is_too_long(limit)).run(60)[-1]
        assert stats.alarm is not None
        assert "shorter than those started" in stats.alarm
        assert stats.mean_ratio < ratio


def test_losing_the_shortest_raises_the_alarm_as_well() -> None:
    history = History(0, is_lost=lambda _draw, group: group.is_done and max(group.lengths) < 300)
    alarm = history.run(60)[-1].alarm
    assert alarm is not None
    assert "longer than those started" in alarm


def test_the_alarm_ends_when_the_cause_ends() -> None:
    history = History(0, is_lost=is_too_long(1600))
    assert history.run(40)[-1].alarm is not None
    history.is_lost = lambda _draw, _group: False
    assert history.run(5 * HALF_LIFE_STEPS)[-1].alarm is None


def test_a_small_bias_raises_no_alarm_however_certain_it_is() -> None:
    lengths = LengthBias(1)
    for number in range(200_000):
        lengths.trained(100 + number % 100)
    for _ in range(2_000):
        lengths.dropped(199)
    stats = lengths.stats([])
    assert stats.bias > stats.chance
    assert stats.mean_ratio < 1
    assert stats.alarm is None


def test_one_lost_group_is_chance() -> None:
    for group_size, is_alarm in ((1, True), (64, False)):
        lengths = LengthBias(group_size)
        for number in range(640):
            lengths.trained(100 + number % 100)
        for _ in range(64):
            lengths.dropped(5_000)
        assert (lengths.stats([]).alarm is not None) is is_alarm


def test_the_bias_explained_by_chance_counts_groups_on_both_sides() -> None:
    lengths = LengthBias(4)
    for _ in range(40):
        lengths.trained(100)
    for _ in range(8):
        lengths.dropped(100)
    critical = math.sqrt(-math.log(ALPHA / 2) / 2)  # Kolmogorov-Smirnov, two samples of 10 and 2
    assert lengths.stats([]).chance == pytest.approx(MARGIN * critical * 8 / 48 * math.sqrt(1 / 10 + 1 / 2))


def test_the_started_lengths_are_known_before_the_long_ones_end() -> None:
    errors, naive = [], []
    for seed in SEEDS:
        history = History(seed)
        stats = history.run(6)[-1]
        truth = fmean(history.started)
        assert stats.started is not None
        assert stats.let_through is not None
        errors.append(stats.started.mean / truth - 1)
        naive.append(stats.let_through.mean / truth - 1)
    assert abs(fmean(errors)) < 0.07
    assert fmean(naive) < -0.15


def test_the_started_lengths_follow_a_drift() -> None:
    history = History(3, drift_per_step=1.02)
    stats = history.run(80)[-1]
    late = fmean(history.started[-20 * GROUPS_PER_STEP * 4 :])
    assert stats.started is not None
    assert late * 0.6 < stats.started.mean < late
    assert stats.started.mean > 1.15 * fmean(history.started)


def test_a_life_table_agrees_with_one_made_by_hand() -> None:
    # Of 10 samples 4 end in the first bucket and 2 are cut there; of the other 4, 3 end in the second and 1 stays.
    ended, cut, grown = ([0.0] * 66 for _ in range(3))
    ended[5], cut[5], ended[6], grown[6] = 4.0, 2.0, 3.0, 1.0
    shares = life_table(ended, cut, grown)
    first = 4 / 9
    second = (1 - first) * 3 / 3.5
    assert shares[5:8] == pytest.approx([first, second, 1 - first - second])
    assert sum(shares) == pytest.approx(1)


def test_buckets_are_a_root_of_two_apart() -> None:
    edges = [length for length in range(1, 40_000) if bucket_of(length) != bucket_of(length - 1)]
    assert edges[:8] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert all(1.3 < above / below < 1.5 for below, above in pairwise(edges[8:]))


def test_quantiles_are_close() -> None:
    lengths, draw = LengthBias(1), random.Random(0)
    drawn = sorted(int(draw.lognormvariate(6, 1)) + 1 for _ in range(20_000))
    for length in drawn:
        lengths.finished(length)
        lengths.trained(length)
    stats = lengths.stats([])
    assert stats.let_through == stats.started == stats.fair
    assert stats.let_through is not None
    assert stats.let_through.mean == pytest.approx(fmean(drawn))
    assert stats.let_through.p50 == pytest.approx(drawn[10_000], rel=0.03)
    assert stats.let_through.p95 == pytest.approx(drawn[19_000], rel=0.03)


def test_there_are_no_statistics_before_the_first_sample_ended() -> None:
    lengths = LengthBias(8)
    lengths.cut(5)
    stats = lengths.stats([10, 20])
    assert (stats.started, stats.let_through, stats.fair, stats.alarm) == (None, None, None, None)
    assert (stats.bias, stats.mean_ratio, stats.cut) == (0.0, 1.0, 1)


def test_reading_the_statistics_twice_changes_nothing() -> None:
    history = History(1)
    history.run(3)
    assert history.lengths.stats([5, 900]) == history.lengths.stats([5, 900])


def test_empty_answers_are_counted() -> None:
    lengths = LengthBias(1)
    lengths.finished(0)
    lengths.trained(0)
    stats = lengths.stats([0])
    assert stats.trained == 1
    assert stats.let_through is not None
    assert stats.let_through.mean == 0.0
    assert stats.mean_ratio == 1.0


def test_a_group_has_samples() -> None:
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        LengthBias(0)


def test_recording_lengths_costs_about_a_microsecond() -> None:
    lengths = LengthBias(8)

    def note() -> None:
        for number in range(100_000):
            lengths.finished(number)

    plain_s = cost_s(lambda: sum(number % 7 for number in range(100_000)))
    # It takes 6 times as long, a microsecond each, and the figures twice.
    assert cost_s(note) < 24 * plain_s
    assert cost_s(lambda: lengths.stats(range(100_000))) < 9 * plain_s


def cost_s(work: Callable[[], object]) -> float:
    """The least processor time of three calls; compare it with that of other work, as machines differ in speed."""
    took = []
    for _ in range(3):
        start = time.process_time()
        work()
        took.append(time.process_time() - start)
    return min(took)
