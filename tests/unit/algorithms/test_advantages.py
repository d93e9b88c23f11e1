"""Advantages against the same arithmetic in plain numpy, or in loops."""

import threading
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import (
    every_step,
    gae,
    group_centred,
    group_normalised,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    step_rewards,
    whitened,
)

LENGTHS = [3, 0, 5, 1]
"""Steps of each of four samples; the second has none."""


def interleaved_groups() -> tuple[np.ndarray, np.ndarray]:
    """Rewards of three groups of unequal size, whose samples are not contiguous."""
    rng = np.random.default_rng(0)
    groups = np.array([7, 3, 7, 7, 3, 900, 7, 3])
    return rng.normal(size=len(groups)), groups


def drawn(*shape: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(1).normal(size=shape))


def samples(values: torch.Tensor) -> list[list[float]]:
    """The steps of each sample as a list."""
    flat = iter(values.tolist())
    return [[next(flat) for _ in range(length)] for length in LENGTHS]


def test_normalised_rewards_are_the_group_s_z_scores() -> None:
    rewards, groups = interleaved_groups()
    expected = np.zeros_like(rewards)
    for group in set(groups.tolist()) - {900}:
        mine = rewards[groups == group]
        expected[groups == group] = (mine - mine.mean()) / (mine.std(ddof=1) + 1e-6)
    got = group_normalised(torch.tensor(rewards), torch.tensor(groups)).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_centred_rewards_are_not_divided() -> None:
    rewards, groups = interleaved_groups()
    expected = [reward - rewards[groups == group].mean() for reward, group in zip(rewards, groups, strict=True)]
    np.testing.assert_allclose(group_centred(torch.tensor(rewards), torch.tensor(groups)).numpy(), expected, atol=1e-12)


def test_an_uneven_group_by_hand() -> None:
    """Rollouts with rewards 1; 0, 0.5 and 1; 0: means 1, 0.5 and 0, so the group's mean is 0.5."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]).double()
    rollouts = torch.tensor([4, 2, 2, 2, 9])
    group = torch.zeros(5, dtype=torch.long)
    centred = group_centred(rewards, group, rollouts)
    assert centred.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.5, -0.5])
    deviation = ((0.25 + (0.25 + 0.0 + 0.25) / 3 + 0.25) / 2) ** 0.5
    expected = [each / (deviation + 1e-6) for each in centred.tolist()]
    assert group_normalised(rewards, group, rollouts).tolist() == pytest.approx(expected)


def test_splitting_a_rollout_into_samples_changes_no_advantage() -> None:
    rewards, groups = map(torch.tensor, interleaved_groups())
    copies = torch.tensor([1, 3, 2, 1, 1, 4, 1, 2])
    split = [each.repeat_interleave(copies) for each in (rewards, groups, torch.arange(len(rewards)))]
    for compare in (group_centred, group_normalised):
        torch.testing.assert_close(compare(*split), compare(rewards, groups).repeat_interleave(copies))


@pytest.mark.parametrize("compare", [group_centred, group_normalised])
def test_one_sample_per_rollout_gives_the_same_bits(compare: Callable[..., torch.Tensor]) -> None:
    rewards, groups = map(torch.tensor, interleaved_groups())
    numbers = torch.tensor([3, 0, 1, 0, 1, 0, 2, 7])
    assert torch.equal(compare(rewards, groups, numbers), compare(rewards, groups))


def test_the_samples_of_an_only_rollout_are_compared_with_each_other() -> None:
    advantages = group_normalised(torch.tensor([1.0, 0.0]), torch.zeros(2), torch.zeros(2, dtype=torch.long))
    assert advantages.tolist() == pytest.approx([1.0, -1.0], rel=1e-5)


@pytest.mark.parametrize("advantages", [group_normalised, group_centred])
def test_a_group_of_one_and_a_group_of_equals_teach_nothing(
    advantages: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    rewards = torch.tensor([5.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert advantages(rewards, torch.tensor([0, 1, 1, 1])).tolist() == [0.0] * 4


@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.1, 1e10 + 0.1, -1e15])
@pytest.mark.parametrize("size", [3, 16])
def test_equal_rewards_of_any_size_teach_nothing(reward: float, size: int) -> None:
    rewards, groups = torch.full((size,), reward, dtype=torch.float64), torch.zeros(size)
    uneven = torch.arange(size) // 2
    for rollouts in (None, uneven):
        assert group_normalised(rewards, groups, rollouts).tolist() == [0.0] * size
        assert group_normalised(rewards.float(), groups, rollouts).tolist() == [0.0] * size


def test_a_nan_reward_reaches_its_own_group_only() -> None:
    rewards = torch.tensor([float("nan"), 1.0, 0.0, 1.0], dtype=torch.float64)
    got = group_normalised(rewards, torch.tensor([0, 0, 1, 1]))
    assert got.isnan().tolist() == [True, True, False, False]


def test_every_step_of_a_sample_has_its_value() -> None:
    assert every_step(torch.tensor([1.0, 2.0, 3.0, 4.0]), LENGTHS).tolist() == [1, 1, 1, 3, 3, 3, 3, 3, 4]


def test_the_reward_comes_at_the_last_step_and_kl_is_charged_at_each() -> None:
    rewards, kl = [10.0, 20.0, 30.0, 40.0], drawn(9)
    expected = [[-0.5 * each for each in row] for row in samples(kl)]
    for row, reward in zip(expected, rewards, strict=True):
        if row:
            row[-1] += reward
    got = step_rewards(torch.tensor(rewards, dtype=torch.float64), kl, LENGTHS, kl_coef=0.5)
    np.testing.assert_allclose(got.numpy(), list(chain(*expected)), rtol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus_sums_what_is_still_to_come(gamma: float) -> None:
    rewards, kl = drawn(4), drawn(9) * 0.1
    expected = []
    for reward, row in zip(rewards.tolist(), samples(kl), strict=True):
        at = [-0.3 * each for each in row]
        if at:
            at[-1] += reward
        expected += [sum(gamma ** (s - t) * at[s] for s in range(t, len(at))) for t in range(len(at))]
    got = reinforce_plus_plus(rewards, kl, LENGTHS, kl_coef=0.3, gamma=gamma)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-15)


def test_the_baseline_variant_charges_each_step_its_own_kl() -> None:
    centred, kl = drawn(4), drawn(9)
    rows = zip(centred.tolist(), samples(kl), strict=True)
    expected = [value - 0.3 * each for value, row in rows for each in row]
    got = reinforce_plus_plus_baseline(centred, kl, LENGTHS, kl_coef=0.3)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_is_the_weighted_sum_of_temporal_differences(gamma: float, lambd: float) -> None:
    rewards, values = drawn(2, 9)
    expected, returns = [], []
    for r, v in zip(samples(rewards), samples(values), strict=True):
        after = [*v[1:], 0.0]
        delta = [r[t] + gamma * after[t] - v[t] for t in range(len(r))]
        advantages = [sum((gamma * lambd) ** (s - t) * delta[s] for s in range(t, len(r))) for t in range(len(r))]
        expected += advantages
        returns += [advantage + value for advantage, value in zip(advantages, v, strict=True)]
    got, towards = gae(rewards, values, LENGTHS, gamma=gamma, lambd=lambd)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(towards.numpy(), returns, rtol=1e-12)


def test_without_discount_returns_are_the_rewards_to_come_whatever_the_values() -> None:
    rewards = step_rewards(torch.tensor([2.0, 9.0, -1.0, 4.0]), torch.zeros(9), LENGTHS, kl_coef=0.0)
    _, returns = gae(rewards, drawn(9).float(), LENGTHS, gamma=1.0, lambd=1.0)
    np.testing.assert_allclose(returns.numpy(), [2.0] * 3 + [-1.0] * 5 + [4.0], atol=1e-6)


def test_no_samples_have_no_advantages() -> None:
    nothing = torch.zeros(0)
    assert reinforce_plus_plus(nothing, nothing, [], kl_coef=0.1, gamma=0.9).tolist() == []
    assert reinforce_plus_plus(torch.ones(2), nothing, [0, 0], kl_coef=0.1, gamma=0.9).tolist() == []
    assert gae(nothing, nothing, [], gamma=1.0, lambd=1.0)[1].tolist() == []


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    values = drawn(50) * 3 + 7
    expected = (values.numpy() - values.numpy().mean()) / values.numpy().std(ddof=1)
    np.testing.assert_allclose(whitened(values, lambda numbers: numbers).numpy(), expected, rtol=1e-8)


def test_ranks_with_unequal_shares_whiten_as_one() -> None:
    values = drawn(20) * 3 + 7
    shares = [values[:13], values[13:], values[:0]]
    found: dict[int, torch.Tensor] = {}
    meeting, given = threading.Barrier(len(shares)), [torch.zeros(0)] * len(shares)

    def run(rank: int) -> None:
        def total(numbers: torch.Tensor) -> torch.Tensor:
            given[rank] = numbers
            meeting.wait(5)
            summed = torch.stack(given).sum(0)
            meeting.wait(5)
            return summed

        found[rank] = whitened(shares[rank], total)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shares))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    alone = whitened(values, lambda numbers: numbers)
    torch.testing.assert_close(torch.cat([found[rank] for rank in range(3)]), alone, rtol=1e-12, atol=1e-12)
