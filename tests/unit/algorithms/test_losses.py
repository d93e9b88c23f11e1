"""Losses against the same arithmetic in plain numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import cispo, gspo, ppo_clip, rollout_weights, token_weights, value_loss


def test_the_clipped_loss_is_equation_7_of_ppo() -> None:
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(scale=0.5, size=(3, 200))
    expected, clipped = [], []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = np.exp(n - o)
        held = min(max(ratio, 0.8), 1.28)
        expected.append(-min(ratio * a, held * a))
        clipped.append(held * a < ratio * a)
    mask = torch.ones(200, dtype=torch.bool)
    loss, was_clipped = ppo_clip(
        torch.tensor(new), torch.tensor(old), torch.tensor(advantages), mask, eps_low=0.2, eps_high=0.28
    )
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    assert was_clipped.tolist() == clipped
    assert 20 < sum(clipped) < 180


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative() -> None:
    rng = np.random.default_rng(1)
    new, old, advantages = rng.normal(scale=1.0, size=(3, 200))
    expected = []
    for n, o, a in zip(new, old, advantages, strict=True):
        ratio = np.exp(n - o)
        objective = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        expected.append(-max(objective, 3.0 * a) if a < 0 else -objective)
    mask = torch.ones(200, dtype=torch.bool)
    given = torch.tensor(new), torch.tensor(old), torch.tensor(advantages), mask
    loss, clipped = ppo_clip(*given, eps_low=0.2, eps_high=0.2, eps_dual=3.0)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    single, was_clipped = ppo_clip(*given, eps_low=0.2, eps_high=0.2)
    assert 0 < (loss < single).sum() == (clipped & ~was_clipped).sum()


def test_gspo_s_ratio_is_the_geometric_mean_over_the_sample() -> None:
    rng = np.random.default_rng(2)
    lengths, mask = [4, 1, 6], np.array([1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1])
    new, old = rng.normal(scale=0.4, size=(2, 11))
    advantages, expected, start = np.repeat([1.5, -0.5, 1.0], lengths), [], 0
    for length in lengths:
        of = slice(start, start + length)
        likelier = np.prod(np.exp(new[of] - old[of])[mask[of] == 1])
        ratio, a = likelier ** (1 / mask[of].sum()), advantages[start]
        expected += [-min(ratio * a, min(max(ratio, 0.9), 1.05) * a)] * length
        start += length
    moved = torch.tensor(new, requires_grad=True)
    loss, clipped = gspo(
        moved,
        torch.tensor(old),
        torch.tensor(advantages),
        torch.tensor(mask).bool(),
        lengths,
        eps_low=0.1,
        eps_high=0.05,
    )
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-12)
    assert clipped.any()
    assert not clipped[mask == 0].any()


def test_gspo_s_gradient_is_spread_evenly_over_the_sample() -> None:
    new = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    mask = torch.tensor([True, True, False, True])
    loss, _ = gspo(new, new.detach(), torch.full((4,), 2.0), mask, [4], eps_low=0.2, eps_high=0.2)
    (loss * rollout_weights(mask, [4], [3])).sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    assert new.grad is not None
    np.testing.assert_allclose(new.grad.numpy(), [-2 / 3, -2 / 3, 0.0, -2 / 3], rtol=1e-6)


def test_cispo_s_clipped_tokens_keep_their_gradient() -> None:
    rng = np.random.default_rng(3)
    new, old, advantages = rng.normal(scale=0.5, size=(3, 100))
    held = np.clip(np.exp(new - old), 0.0, 1.3)
    moved = torch.tensor(new, requires_grad=True)
    loss, clipped = cispo(
        moved, torch.tensor(old), torch.tensor(advantages), torch.ones(100).bool(), eps_low=1.0, eps_high=0.3
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    assert moved.grad is not None
    np.testing.assert_allclose(loss.detach().numpy(), -held * advantages * new, rtol=1e-12)
    np.testing.assert_allclose(moved.grad.numpy(), -held * advantages, rtol=1e-12)
    assert clipped.tolist() == (np.exp(new - old) > 1.3).tolist()
    assert clipped.any()


def test_the_value_loss_is_the_larger_of_two_squares() -> None:
    values, old, returns = np.random.default_rng(4).normal(size=(3, 100))
    held = old + np.clip(values - old, -0.2, 0.2)
    expected = np.maximum((values - returns) ** 2, (held - returns) ** 2)
    loss, clipped = value_loss(*map(torch.tensor, (values, old, returns)), clip=0.2)
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-12)
    assert clipped.tolist() == (np.abs(values - old) > 0.2).tolist()


def test_a_masked_token_may_carry_any_number() -> None:
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = torch.tensor([-1.0, float("nan"), -1e30])
    mask = torch.tensor([True, False, False])
    loss, clipped = ppo_clip(new, old, torch.ones(3), mask, eps_low=0.2, eps_high=0.2)
    (loss * token_weights(mask, [3])).sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0, 0.0]
    assert not clipped.any()


def test_a_ratio_that_would_overflow_teaches_nothing_instead_of_ending_the_run() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    loss, _ = ppo_clip(
        new, torch.tensor([-200.0]), torch.zeros(1), torch.ones(1, dtype=torch.bool), eps_low=0.2, eps_high=0.2
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    assert loss.item() == 0.0
    assert new.grad is not None
    assert new.grad.tolist() == [0.0]


@pytest.mark.parametrize("loss_of", [ppo_clip, cispo])
def test_no_masked_token_is_clipped(loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    far = torch.tensor([3.0, 3.0])
    _, clipped = loss_of(far, -far, torch.ones(2), torch.tensor([True, False]), eps_low=0.2, eps_high=0.2)
    assert clipped.tolist() == [True, False]


def test_an_empty_microbatch_has_no_weights() -> None:
    nothing = torch.zeros(0, dtype=torch.bool)
    assert token_weights(nothing, ()).tolist() == rollout_weights(nothing, (), ()).tolist() == []


def test_the_gradient_at_ratio_one_is_minus_the_advantage() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = ppo_clip(
        new, new.detach(), torch.tensor([2.0, -3.0]), torch.ones(2, dtype=torch.bool), eps_low=0.2, eps_high=0.2
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
    assert new.grad is not None
    assert new.grad.tolist() == [-2.0, 3.0]


def test_rollout_weights_give_the_mean_of_the_means() -> None:
    lengths = [3, 1, 4]
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0]).bool()
    loss = torch.arange(8.0)
    means = [1.0, 0.0, 5.0]  # the second sample has no token that counts
    assert (loss * rollout_weights(mask, lengths, [2, 0, 3])).sum().item() / 3 == pytest.approx(np.mean(means))


def test_samples_of_one_rollout_are_averaged_over_their_tokens_together() -> None:
    lengths = [3, 1, 4]
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 0]).bool()
    loss = torch.arange(8.0)
    means = [(0 + 2 + 4 + 5 + 6) / 5, 3.0]  # the first and the last sample are one rollout
    assert (loss * rollout_weights(mask, lengths, [5, 1, 5])).sum().item() / 2 == pytest.approx(np.mean(means))


def test_weights_of_single_samples_are_the_bits_of_a_division_by_their_sum() -> None:
    lengths = list(range(1, 200))
    mask = torch.arange(sum(lengths)) % 7 != 3
    parts = mask.float().split(lengths)  # type: ignore[no-untyped-call]  # torch is untyped
    expected = torch.cat([part / part.sum().clamp(min=1.0) for part in parts])
    assert torch.equal(rollout_weights(mask, lengths, [int(part.sum()) for part in parts]), expected)


def test_the_weighted_sum_does_not_depend_on_where_it_is_cut() -> None:
    lengths = [3, 1, 4]
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 1, 0]).bool()
    whole = rollout_weights(mask, lengths, [5, 0, 5])
    pieces = torch.cat([rollout_weights(mask[:4], lengths[:2], [5, 0]), rollout_weights(mask[4:], lengths[2:], [5])])
    assert whole.tolist() == pieces.tolist()


def test_lengths_that_do_not_fit_the_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths add up to 2, mask_T has 3 entries"):
        token_weights(torch.ones(3), [1, 1])
