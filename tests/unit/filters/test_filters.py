import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from asyncrl.filters import Fresh, LengthBounds, RewardBounds, TruncatedShare, all_of, check_reward_nonzero_std
from asyncrl.protocols import KeepFn
from asyncrl.types import FinishReason, GroupId, ScoredGroup, Span, Turn, Weights
from tests.unit.scored_groups import group


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [((1.0, 0.0), None), ((1.0, 1.0), "zero_std_1.0"), ((0.1, 0.1 + 1e-9), "zero_std_0.1"), ((-1.0,), "zero_std_-1.0")],
)
def test_groups_whose_rewards_are_equal_are_dropped(rewards: tuple[float, ...], reason: str | None) -> None:
    assert check_reward_nonzero_std(group(0, rewards)) == reason


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0, 0.0), None),
        ((0.25, 0.25), None),
        ((0.75,), None),
        ((0.0, 0.25), "reward_below_0.25"),
        ((1.0, 1.0), "reward_above_0.75"),
    ],
)
def test_reward_bounds_are_on_the_mean_and_inclusive(rewards: tuple[float, ...], reason: str | None) -> None:
    assert RewardBounds(low=0.25, high=0.75)(group(0, rewards)) == reason


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (LengthBounds(low=10, high=30), None),
        (LengthBounds(high=29), "longest_length_above_29"),
        (LengthBounds(low=31), "longest_length_below_31"),
        (LengthBounds(low=10, of="shortest"), None),
        (LengthBounds(low=11, of="shortest"), "shortest_length_below_11"),
        (LengthBounds(high=20, of="mean"), None),
        (LengthBounds(high=19.5, of="mean"), "mean_length_above_19.5"),
    ],
)
def test_length_bounds_are_in_tokens_and_inclusive(keep: KeepFn, reason: str | None) -> None:
    assert keep(group(0, (1.0, 0.0, 1.0), (10, 20, 30))) == reason


def test_length_bounds_do_not_count_observations() -> None:
    plain = group(0, (1.0,), (5,))
    scored = plain.samples[0]
    turn = Turn(call=0, start=1, stop=3, finish=FinishReason.STOP)
    span = replace(scored.sample.spans[0], start=1, stop=3)
    sample = replace(scored.sample, turns=(turn,), spans=(span,))
    episode = replace(plain, samples=(replace(scored, sample=sample, loss_mask=(0, 1, 1, 0, 0)),))
    assert LengthBounds(low=2, high=2)(episode) is None
    assert LengthBounds(low=2, high=2)(plain) == "longest_length_above_2"


@pytest.mark.parametrize(("num_cut", "reason"), [(0, None), (2, None), (3, "truncated_above_0.5")])
def test_groups_that_were_cut_too_often_are_dropped(num_cut: int, reason: str | None) -> None:
    assert TruncatedShare(high=0.5)(group(0, (1.0, 0.0, 1.0, 0.0), num_cut=num_cut)) == reason


@pytest.mark.parametrize(
    ("made", "arguments", "message"),
    [
        (RewardBounds, {"low": 1, "high": 0}, "low 1 must not be above high 0"),
        (RewardBounds, {"low": math.nan}, "low nan must not be above high inf"),
        (LengthBounds, {"of": "median"}, "of must be one of longest, shortest, mean, got 'median'"),
        (TruncatedShare, {"high": 2}, "high must be 0 to 1, got 2"),
        (Fresh, {"max_lag": -1}, "max_lag must be at least 0, got -1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(made: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**arguments)


def test_filters_cannot_be_changed_in_mid_run() -> None:
    keep: Any = RewardBounds(low=0)
    with pytest.raises(FrozenInstanceError):
        keep.low = 1


def test_of_several_filters_the_first_that_drops_gives_the_reason() -> None:
    keep = all_of(RewardBounds(high=0.9), LengthBounds(low=2), check_reward_nonzero_std)
    assert keep(group(0, (1.0, 0.0), (1, 3))) is None
    assert keep(group(0, (1.0, 1.0), (1, 1))) == "reward_above_0.9"
    assert keep(group(0, (0.5, 0.5), (1, 1))) == "longest_length_below_2"
    assert keep(group(0, (0.5, 0.5), (1, 3))) == "zero_std_0.5"


def test_only_filters_can_be_combined() -> None:
    name: Any = "asyncrl.filters:check_reward_nonzero_std"
    with pytest.raises(TypeError, match="is not a filter; combine filters in a file and name the result"):
        all_of(name)


def masked_until(scored_group: ScoredGroup, step: int) -> ScoredGroup:
    """A group whose first token is of the weights of ``step``, and masked."""
    (scored,) = scored_group.samples
    (span,) = scored.sample.spans
    old = Span(weights=Weights(version=step, step=step), start=0, stop=1)
    sample = replace(scored.sample, spans=(old, replace(span, start=1)))
    return replace(scored_group, samples=(replace(scored, sample=sample, loss_mask=(0, *scored.loss_mask[1:])),))


def test_only_fresh_groups_are_picked_oldest_first() -> None:
    waiting = [group(number, (1.0,), (4,), step=number) for number in range(5)]
    picked = Fresh(max_lag=3)(5, waiting, 2)
    assert picked.train == (2, 3)
    assert picked.drop == {GroupId(0): "lag_above_3", GroupId(1): "lag_above_3"}
    assert Fresh(max_lag=0)(9, waiting, 2).train == ()


def test_freshness_is_of_trained_tokens() -> None:
    fresh = masked_until(group(0, (1.0,), (4,), step=5), 1)
    assert Fresh(max_lag=0)(5, [fresh], 1).train == (0,)
    assert Fresh(max_lag=0)(6, [fresh], 1).train == ()


def test_a_group_without_trained_tokens_is_never_too_old() -> None:
    assert Fresh(max_lag=0)(7, [group(0, (1.0,), (0,))], 1).train == (0,)
