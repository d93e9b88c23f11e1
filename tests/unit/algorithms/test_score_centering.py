"""Score centering against autograd over the whole vocabulary."""

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.score_centering import SMALLEST_TAIL, KnownIds, RatioWeight, score_centering

VOCABULARY = 12
NUM_TOKENS = 40
WEIGHTS = [
    RatioWeight(mode="none"),
    RatioWeight(mode="whole"),
    RatioWeight(mode="truncate", high=1.5),
    RatioWeight(mode="clip", low=0.7, high=1.3),
    RatioWeight(mode="mask", low=0.5, high=2.0),
]


def policies(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of the trained policy, with a gradient, and log-probs of the policy that sampled."""
    torch.manual_seed(seed)
    logits = torch.randn(NUM_TOKENS, VOCABULARY, dtype=torch.float64)
    behaviour = (logits + 0.4 * torch.randn_like(logits)).log_softmax(-1)
    return logits.requires_grad_(), behaviour


def known_ids(logprobs: Tensor, behaviour: Tensor, count: int) -> KnownIds:
    ids = behaviour.topk(count, dim=-1).indices
    return KnownIds(
        counts_T=torch.full((NUM_TOKENS,), count),
        logprobs_I=logprobs.gather(1, ids).flatten(),
        behaviour_I=behaviour.gather(1, ids).flatten(),
    )


def centered(logits: Tensor, behaviour: Tensor, drawn: Tensor, count: int, weight: RatioWeight) -> Tensor:
    """The gradient of the logits for advantages of -1, for which the loss is the surrogate of the score itself."""
    logprobs = logits.log_softmax(-1)
    at = (torch.arange(NUM_TOKENS), drawn)
    ones = torch.ones(NUM_TOKENS, dtype=torch.float64)
    losses, _ = score_centering(
        logprobs[at], behaviour[at], -ones, ones.bool(), known_ids(logprobs, behaviour, count), weight
    )
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return gradient


def exact(logits: Tensor, behaviour: Tensor, drawn: Tensor, count: int, weight: RatioWeight) -> Tensor:
    """The same with the mean written out over the whole vocabulary, the unknown part of q as rho p."""
    logprobs = logits.log_softmax(-1)
    p, q = logprobs.detach().exp(), behaviour.exp()
    is_known = torch.zeros_like(p, dtype=torch.bool).scatter_(1, behaviour.topk(count, dim=-1).indices, True)
    tails = [(1 - torch.where(is_known, each, 0.0).sum(-1, keepdim=True)).clamp(min=SMALLEST_TAIL) for each in (q, p)]
    modelled = torch.where(is_known, q, p * tails[0] / tails[1])
    mean = (modelled * weight(p / modelled) * logprobs).sum(-1)
    at = (torch.arange(NUM_TOKENS), drawn)
    own = weight(p[at] / q[at]) * logprobs[at]
    (gradient,) = torch.autograd.grad((own - mean).sum(), logits)
    return gradient


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.mode)
@pytest.mark.parametrize("count", [1, 4, VOCABULARY])
def test_gradients_are_those_over_the_whole_vocabulary(count: int, weight: RatioWeight) -> None:
    logits, behaviour = policies()
    drawn = torch.randint(VOCABULARY, (NUM_TOKENS,))

    apart = centered(logits, behaviour, drawn, count, weight) - exact(logits, behaviour, drawn, count, weight)

    assert float(apart.abs().max()) < 1e-6


@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.mode)
def test_the_expected_score_is_zero_if_all_ids_are_known(weight: RatioWeight) -> None:
    logits, behaviour = policies()

    expected = torch.zeros(NUM_TOKENS, VOCABULARY, dtype=torch.float64)
    for token in range(VOCABULARY):
        drawn = torch.full((NUM_TOKENS,), token)
        probability = behaviour.exp()[:, token : token + 1]
        expected += probability * centered(logits, behaviour, drawn, VOCABULARY, weight)

    assert float(expected.abs().max()) < 1e-12


def test_more_known_ids_leave_less_of_the_expected_score() -> None:
    logits, behaviour = policies()
    weight = RatioWeight(mode="none")

    left = []
    for count in (1, 4, 8, VOCABULARY):
        parts = [
            behaviour.exp()[:, token : token + 1]
            * centered(logits, behaviour, torch.full((NUM_TOKENS,), token), count, weight)
            for token in range(VOCABULARY)
        ]
        left.append(float(torch.stack(parts).sum(0).norm()))

    assert left == sorted(left, reverse=True)
    assert left[-1] < 1e-12 < left[-2]


def test_the_same_policy_needs_no_centering() -> None:
    logits, _ = policies()
    behaviour = logits.detach().log_softmax(-1)
    drawn = torch.randint(VOCABULARY, (NUM_TOKENS,))

    got = centered(logits, behaviour, drawn, 3, RatioWeight(mode="truncate"))

    logprobs = logits.log_softmax(-1)
    (score,) = torch.autograd.grad(logprobs[torch.arange(NUM_TOKENS), drawn].sum(), logits)
    torch.testing.assert_close(got, score)


def test_with_weight_one_and_all_ids_the_gradient_does_not_depend_on_the_trained_policy() -> None:
    logits, behaviour = policies()
    drawn = torch.randint(VOCABULARY, (NUM_TOKENS,))

    got = centered(logits, behaviour, drawn, VOCABULARY, RatioWeight(mode="none"))

    one_hot = torch.nn.functional.one_hot(drawn, VOCABULARY)
    torch.testing.assert_close(got, one_hot - behaviour.exp(), rtol=0, atol=1e-12)


def test_with_the_whole_ratio_nothing_is_subtracted() -> None:
    logits, behaviour = policies()
    logprobs = logits.log_softmax(-1)
    known, ones = known_ids(logprobs, behaviour, VOCABULARY), torch.ones(NUM_TOKENS, dtype=torch.float64)

    _, subtracted = score_centering(
        logprobs[:, 0], behaviour[:, 0], ones, ones.bool(), known, RatioWeight(mode="whole")
    )

    assert float(subtracted.max()) < 1e-12


def test_tokens_without_known_ids_or_outside_the_loss() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    known = KnownIds(
        counts_T=torch.tensor([0, 2, 0]),
        logprobs_I=torch.tensor([-2.0, -1.0], requires_grad=True),
        behaviour_I=torch.tensor([-2.0, -1.0]),
    )

    losses, moved = score_centering(
        logprobs,
        torch.tensor([-1.0, -2.0, float("nan")]),
        torch.tensor([2.0, 1.0, 1.0]),
        torch.tensor([True, True, False]),
        known,
        RatioWeight(mode="none"),
    )

    torch.testing.assert_close(losses, torch.tensor([2.0, 2.0, 0.0]))
    torch.testing.assert_close(moved, torch.zeros(3))
