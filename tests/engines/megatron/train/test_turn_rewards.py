"""Rewards of single turns in the advantages of each estimator, against numbers by hand."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.model.packing import examples_of
from asyncrl.engines.megatron.train.sample_advantages import outcomes_of, turn_outcomes_of, with_advantages
from asyncrl.types import Batch, ScoredSample
from tests.engines.megatron.train.episode_batches import group_of, sample_of

STRETCHES = [("turn", 2), ("observation", 1), ("turn", 1)]
REWARDS = (1.0, 0.0)
"""Rewards of the two answers: their advantages are half and minus half, divided by 0.5 ** 0.5."""


def batch(first: Sequence[float | None], second: Sequence[float | None], **changes: Any) -> Batch:
    """One group of two answers of two turns, with these rewards of turns."""
    rng = random.Random(0)
    samples = [
        replace(sample_of(STRETCHES, rng, index=index, turn_rewards=rewards), **changes)
        for index, rewards in enumerate((first, second))
    ]
    return Batch(step=0, groups=(group_of(0, samples, REWARDS, rng),))


def advantages(given: Batch, **changes: Any) -> list[list[float]]:
    """The advantage of each response token of each sample; a critic's values are 0."""
    train = TrainConfig(**changes)
    examples = [replace(e, values=np.zeros(e.num_response, np.float32)) for e in chain(*examples_of(given))]
    turns = turn_outcomes_of(given, train)
    made, _ = with_advantages(examples, outcomes_of(given, train), train, lambda numbers: numbers, turn_outcomes=turns)
    return [[] if each.advantages is None else each.advantages.tolist() for each in made]


ROOT = 0.5**0.5
A = 0.5 / (ROOT + 1e-6)
"""Advantage of the better answer."""


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_a_turn_is_compared_with_the_turns_of_its_group(estimator: Any) -> None:
    """Rewards of turns 3, none; 0, 0: the mean is 1, the deviation (6 / 2) ** 0.5."""
    high, low = 2 / (3**0.5 + 1e-6), -1 / (3**0.5 + 1e-6)
    first, second = advantages(batch((3.0, None), (0.0, 0.0)), advantage_estimator=estimator)
    assert first == pytest.approx([A + high, A + high, 0.0, A])
    assert second == pytest.approx([-A + low, -A + low, 0.0, -A + low])


@pytest.mark.parametrize("coef", [0.5, 2.0])
def test_without_the_division_turns_are_centred_and_weighed_by_the_coefficient(coef: float) -> None:
    given = batch((3.0, None), (0.0, 0.0))
    first, second = advantages(given, disable_grpo_std_normalization=True, turn_reward_coef=coef)
    assert first == pytest.approx([0.5 + 2 * coef, 0.5 + 2 * coef, 0.0, 0.5])
    assert second == pytest.approx([-0.5 - coef, -0.5 - coef, 0.0, -0.5 - coef])


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        (1.0, [[3.0 + 1.0, 3.0 + 1.0, 0.0, 1.0], [1.0 - 2.0, 1.0 - 2.0, 0.0, -2.0]]),
        (0.5, [[0.5 * 3.5, 3.5, 0.0, 1.0], [0.5 * 0.0, 0.0, 0.0, -2.0]]),
    ],
)
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "ppo"])
def test_rewards_of_steps_get_a_turn_s_reward_at_its_last_step(
    estimator: Any, gamma: float, expected: list[list[float]]
) -> None:
    """Rewards of turns 3, none; 1, -2, and answers' rewards 1 and 0 at the last step."""
    plain = {"advantage_estimator": estimator, "gamma": gamma, "normalize_advantages": False}
    found = advantages(batch((3.0, None), (1.0, -2.0)), **plain)
    assert found == [pytest.approx(row) for row in expected]


def test_the_baseline_estimator_adds_centred_turns_before_the_whitening() -> None:
    raw = np.array([0.5 + 2, 0.5 + 2, 0.5, -0.5 - 1, -0.5 - 1, -0.5 - 1])
    white = (raw - raw.mean()) / raw.std(ddof=1)
    found = advantages(batch((3.0, None), (0.0, 0.0)), advantage_estimator="reinforce_plus_plus_baseline")
    assert found == [pytest.approx([*white[:2], 0.0, white[2]]), pytest.approx([*white[3:5], 0.0, white[5]])]


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"])
@pytest.mark.parametrize(("rewards", "coef"), [((None, None), 1.0), ((3.0, 1.0), 0.0)])
def test_without_rewards_of_turns_advantages_are_those_of_answers(
    estimator: Any, rewards: tuple[float | None, ...], coef: float
) -> None:
    plain = advantages(batch((), ()), advantage_estimator=estimator)
    assert advantages(batch(rewards, rewards), advantage_estimator=estimator, turn_reward_coef=coef) == plain


def test_a_masked_turn_is_compared_and_has_no_advantage() -> None:
    given = batch((3.0, None), (0.0, 0.0))
    group = given.groups[0]
    silent = replace(group.samples[0], loss_mask=(1, 0, 0, 1))
    gone = replace(given, groups=(replace(group, samples=(silent, group.samples[1])),))
    changes: dict[str, Any] = {"disable_grpo_std_normalization": True}
    first, second = advantages(gone, **changes)
    assert first == pytest.approx([2.5, 0.0, 0.0, 0.5])
    assert second == pytest.approx([-1.5, -1.5, 0.0, -1.5])
    plus = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": False}
    with_lost = replace(gone, groups=(replace(group, samples=(_masked(silent), group.samples[1])),))
    assert advantages(with_lost, **plus)[0] == pytest.approx([0.0, 0.0, 0.0, 1.0])  # a turn without steps
    assert advantages(gone, **plus)[0] == pytest.approx([4.0, 0.0, 0.0, 1.0])


def _masked(scored: ScoredSample) -> ScoredSample:
    return replace(scored, loss_mask=(0, 0, 0, 1))


def test_a_turn_that_two_samples_of_a_rollout_hold_counts_once() -> None:
    rng = random.Random(0)
    shared = sample_of([("turn", 1)], rng, index=0, rollout=0, turn_rewards=[3.0])
    longer = sample_of([("turn", 1), ("turn", 1)], rng, index=1, rollout=0, turn_rewards=[3.0, 0.0])
    other = sample_of([("turn", 1)], rng, index=2, rollout=1, turn_rewards=[0.0])
    given = Batch(step=0, groups=(group_of(0, [shared, longer, other], [0.0, 0.0, 0.0], rng),))
    found = advantages(given, disable_grpo_std_normalization=True)
    assert found == [pytest.approx(row) for row in ([2.0], [2.0, -1.0], [-1.0])]


def test_an_answer_without_tokens_keeps_the_places_of_the_others() -> None:
    given = batch((3.0, None), (0.0, 0.0))
    group = given.groups[0]
    blank: dict[str, Any] = {"token_ids": (), "logprobs": array("f"), "spans": (), "turns": ()}
    empty = replace(group.samples[0], sample=replace(group.samples[0].sample, **blank), loss_mask=())
    third = replace(group.samples[1], sample=replace(group.samples[1].sample, index=2))
    wider = replace(given, groups=(replace(group, samples=(empty, group.samples[0], third)),))
    first, second = advantages(wider, disable_grpo_std_normalization=True)
    assert first[3] == pytest.approx(first[0] - 2.0)
    assert second == pytest.approx([second[0], second[0], 0.0, second[0]])
