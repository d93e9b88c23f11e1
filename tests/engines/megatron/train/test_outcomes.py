"""Outcomes of a user's function replace the comparison within groups, for each estimator where slime uses them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.model.packing import Example
from asyncrl.engines.megatron.train.sample_advantages import outcomes_of, with_advantages
from asyncrl.types import Batch, ScoredGroup
from tests.unit.scored_groups import group

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")
OUTCOMES = (5.0, -3.0)


def with_outcomes(plain: ScoredGroup) -> ScoredGroup:
    pairs = zip(plain.samples, OUTCOMES, strict=True)
    return replace(plain, samples=tuple(replace(scored, outcome=outcome) for scored, outcome in pairs))


def batch(*, has_outcomes: bool) -> Batch:
    plain = group(3, (0.0, 1.0), (2, 2))
    return Batch(step=0, groups=(with_outcomes(plain) if has_outcomes else plain,))


def examples() -> list[Example]:
    return [
        Example(
            index=index,
            token_ids=(1, 7, 7),
            num_response=2,
            loss_mask=(1, 1),
            behaviour_logprobs=(-1.0, -1.0),
            proximal_logprobs=np.array([-1.0, -1.0], np.float32),
            ref_logprobs=np.array([-1.0, -1.0], np.float32),
            values=np.array([0.0, 0.0], np.float32),
        )
        for index in range(2)
    ]


def advantages(name: Any) -> list[list[float]]:
    train = TrainConfig(advantage_estimator=name, normalize_advantages=None)
    made, _ = with_advantages(examples(), outcomes_of(batch(has_outcomes=True), train), train, lambda numbers: numbers)
    rows = [example.advantages for example in made]
    return [[] if row is None else list(map(float, row)) for row in rows]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_outcomes_are_taken_as_they_are(name: Any) -> None:
    train = TrainConfig(advantage_estimator=name)
    assert outcomes_of(batch(has_outcomes=True), train).tolist() == list(OUTCOMES)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_they_are_the_advantages_of_group_estimators(name: Any) -> None:
    assert advantages(name) == [[5.0, 5.0], [-3.0, -3.0]]


def test_they_are_the_rewards_of_the_last_steps_of_ppo() -> None:
    assert advantages("ppo") == [[5.0, 5.0], [-3.0, -3.0]]  # lambda and gamma are 1, values 0


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_they_are_whitened_where_the_estimator_does_so(name: Any) -> None:
    root = float(torch.tensor([5.0, 5.0, -3.0, -3.0]).std())
    assert advantages(name)[0] == pytest.approx([4.0 / root] * 2, rel=1e-5)
    assert advantages(name)[1] == pytest.approx([-4.0 / root] * 2, rel=1e-5)


def test_without_outcomes_rewards_are_compared_within_groups() -> None:
    train = TrainConfig(disable_grpo_std_normalization=True)
    assert outcomes_of(batch(has_outcomes=False), train).tolist() == [-0.5, 0.5]
