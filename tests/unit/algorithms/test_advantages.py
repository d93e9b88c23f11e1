"""Advantages against the same arithmetic in plain numpy."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import group_centred, group_normalised


def interleaved_groups() -> tuple[np.ndarray, np.ndarray]:
    """Rewards of three groups of unequal size whose samples do not stand together."""
    rng = np.random.default_rng(0)
    groups = np.array([7, 3, 7, 7, 3, 900, 7, 3])
    return rng.normal(size=len(groups)), groups


def test_normalised_rewards_are_the_group_s_z_scores():
    rewards, groups = interleaved_groups()
    expected = np.zeros_like(rewards)
    for group in set(groups.tolist()) - {900}:
        mine = rewards[groups == group]
        expected[groups == group] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
    got = group_normalised(torch.tensor(rewards), torch.tensor(groups)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_centred_rewards_are_not_divided():
    rewards, groups = interleaved_groups()
    expected = [reward - rewards[groups == group].mean() for reward, group in zip(rewards, groups, strict=True)]
    np.testing.assert_allclose(group_centred(torch.tensor(rewards), torch.tensor(groups)).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("advantages", [group_normalised, group_centred])
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(advantages):
    rewards = torch.tensor([5.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert advantages(rewards, torch.tensor([0, 1, 1, 1])).tolist() == [0.0] * 4


def test_a_nan_reward_reaches_its_own_group_only():
    rewards = torch.tensor([float("nan"), 1.0, 0.0, 1.0], dtype=torch.float64)
    got = group_normalised(rewards, torch.tensor([0, 0, 1, 1]))
    assert got.isnan().tolist() == [True, True, False, False]
