"""KL estimators against numpy, and against the divergence that they estimate."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from asyncrl.algorithms.kl import KlType, kl_estimate


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_each_estimate_is_its_formula(kind: KlType) -> None:
    ours, ref = np.random.default_rng(0).normal(size=(2, 100))
    log_ratio = ref - ours
    expected = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio**2,
        "k3": np.exp(log_ratio) - 1 - log_ratio,
        "low_var_kl": np.clip(np.exp(log_ratio) - 1 - log_ratio, -10, 10),
    }[kind]
    np.testing.assert_allclose(kl_estimate(kind, torch.tensor(ours), torch.tensor(ref)).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_ones_average_to_the_divergence(kind: KlType) -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    exact = (p * (p / q).log()).sum()
    assert (p * kl_estimate(kind, p.log(), q.log())).sum().item() == pytest.approx(exact.item())


def test_the_mean_gradient_of_k2_is_that_of_the_divergence_and_of_k1_is_nothing() -> None:
    logits, q = torch.tensor([0.4, -0.2, 0.1], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5]).double()

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        moved = logits.clone().requires_grad_()
        of(moved.log_softmax(-1)).backward()  # type: ignore[no-untyped-call]  # torch is untyped
        assert moved.grad is not None
        return moved.grad

    p = logits.softmax(-1)
    exact = gradient(lambda logp: (logp.exp() * (logp - q.log())).sum())
    torch.testing.assert_close(gradient(lambda logp: (p * kl_estimate("k2", logp, q.log())).sum()), exact)
    flat = gradient(lambda logp: (p * kl_estimate("k1", logp, q.log())).sum())
    assert flat.abs().max().item() < 1e-12


def test_a_large_distance_stays_finite_and_low_var_kl_small() -> None:
    kinds: tuple[KlType, ...] = ("k1", "k2", "k3")
    far = (torch.tensor([-1.0]), torch.tensor([-500.0])), (torch.tensor([-500.0]), torch.tensor([-1.0]))
    for ours, ref in far:
        assert all(kl_estimate(kind, ours, ref).isfinite().all() for kind in kinds)
        assert kl_estimate("low_var_kl", ours, ref).item() == 10.0


def test_a_weight_is_within_the_clamp_of_low_var_kl_and_scales_the_others() -> None:
    ours, ref, weights = torch.tensor([-0.1, -0.1]), torch.tensor([-9.0, -0.3]), torch.tensor([365.0, 2.0])
    plain = kl_estimate("k3", ours, ref)
    torch.testing.assert_close(kl_estimate("k3", ours, ref, weights), plain * weights)
    bounded = kl_estimate("low_var_kl", ours, ref, weights)
    torch.testing.assert_close(bounded, torch.stack((torch.tensor(10.0), plain[1] * 2.0)))
