"""The policy loss against the same arithmetic in plain numpy."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import ppo_clip, sample_weights, token_weights


def test_the_clipped_loss_is_equation_7_of_ppo():
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(scale=0.5, size=(3, 200))
    expected, clipped = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = np.exp(n - o)
        held = min(max(ratio, 0.8), 1.28)
        expected.append(-min(ratio * a, held * a))
        clipped.append(held * a < ratio * a)
    loss, was_clipped = ppo_clip(
        *map(torch.tensor, (new, old, advantages)), torch.ones(200, dtype=torch.bool), eps_low=0.2, eps_high=0.28
    )
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    assert was_clipped.tolist() == clipped
    assert 20 < sum(clipped) < 180


def test_a_masked_token_may_carry_any_number():
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.0, float("nan"), -1e30])
    mask = torch.tensor([True, False, False])
    loss, clipped = ppo_clip(new, old, torch.ones(3), mask, eps_low=0.2, eps_high=0.2)
    (loss * token_weights(mask, [3])).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0, 0.0]
    assert not clipped.any()


def test_a_ratio_that_would_overflow_teaches_nothing_instead_of_ending_the_run():
    new = torch.tensor([-1.0], requires_grad=True)
    loss, _ = ppo_clip(
        new, torch.tensor([-200.0]), torch.zeros(1), torch.ones(1, dtype=torch.bool), eps_low=0.2, eps_high=0.2
    )
    loss.sum().backward()
    assert loss.item() == 0.0
    assert new.grad is not None
    assert new.grad.tolist() == [0.0]


@pytest.mark.parametrize("weigh", [token_weights, sample_weights])
def test_an_empty_microbatch_has_no_weights(weigh):
    assert weigh(torch.zeros(0, dtype=torch.bool), ()).tolist() == []


def test_the_gradient_at_ratio_one_is_minus_the_advantage():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = ppo_clip(
        new, new.detach(), torch.tensor([2.0, -3.0]), torch.ones(2, dtype=torch.bool), eps_low=0.2, eps_high=0.2
    )
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [-2.0, 3.0]


def test_sample_weights_give_the_mean_of_the_means():
    lengths = [3, 1, 4]
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0]).bool()
    loss = torch.arange(8.0)
    means = [np.mean([0, 2]), 0.0, np.mean([4, 5, 6])]  # the second sample has no token that counts
    assert (loss * sample_weights(mask, lengths)).sum().item() / 3 == pytest.approx(np.mean(means))


def test_the_weighted_sum_does_not_depend_on_where_it_is_cut():
    lengths = [3, 1, 4]
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0]).bool()
    whole = sample_weights(mask, lengths)
    pieces = torch.cat([sample_weights(mask[:4], lengths[:2]), sample_weights(mask[4:], lengths[2:])])
    assert whole.tolist() == pieces.tolist()


def test_lengths_that_do_not_fit_the_mask_are_refused():
    with pytest.raises(ValueError, match="lengths add up to 2, mask_T has 3 entries"):
        token_weights(torch.ones(3), [1, 1])
