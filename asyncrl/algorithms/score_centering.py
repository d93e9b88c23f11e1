"""Score centering: a policy loss without the drift that stale or inexact sampling adds.

With q the policy that sampled, p the one that is trained and f a weight of their ratio, the expected update of
REINFORCE is ``E_q[A f score]``.  Its part ``E_q[A] E_q[f score]`` is drift: it would be zero if q were p, and moves the
policy even where all advantages are equal.  Score centering subtracts the mean of the weighted score over the
vocabulary, of which the sampler's likeliest tokens are known exactly (Marek and Ryabinin, arXiv 2609.20807).
Shape letters: T response tokens, I the known ids of all of them, token after token.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.losses import MAX_LOG_RATIO

SMALLEST_TAIL = 1e-4
"""Least probability of all ids that are not known, for the ratio of the two tails.

Terms of size alpha cancel in the gradient.  With this bound, float32 leaves an error of 1e-3 of a score at most.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioWeight:
    """The weight f(p / q) of a token, the same as ``corrections.importance_weights`` has for single tokens."""

    mode: Literal["none", "truncate", "clip", "mask", "whole"]
    """``none``: 1, whatever the ratio.  The others are described there."""
    low: float = 0.0
    high: float = 2.0

    def __call__(self, ratio: Tensor) -> Tensor:
        """Return the weight of each ratio."""
        if self.mode == "none":
            return torch.ones_like(ratio)
        if self.mode in ("truncate", "clip"):
            return ratio.clamp(self.low, self.high)
        if self.mode == "mask":
            return torch.where((ratio < self.low) | (ratio > self.high), 0.0, ratio)
        return ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownIds:
    """The sampler's likeliest ids at each token, with log-probs under both policies."""

    counts_T: Tensor
    """Number of known ids of each token; 0: the token's score is not centered."""
    logprobs_I: Tensor
    """Under the policy that is trained, with a gradient."""
    behaviour_I: Tensor
    """Under the policy that sampled."""

    @property
    def tokens_I(self) -> Tensor:
        """The token that each id belongs to."""
        tokens_T = torch.arange(len(self.counts_T), device=self.counts_T.device)
        return tokens_T.repeat_interleave(self.counts_T, output_size=len(self.logprobs_I))


def score_centering(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    known: KnownIds,
    weight: RatioWeight,
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each token, and how much of a score was subtracted.

    ``-A (sg[f(p_t / q_t)] log p_t - sum_v sg[q_v f(p_v / q_v) - alpha p_v] log p_v)`` over the known ids v, with
    ``alpha = rho f(1 / rho)`` and ``rho = (1 - q(known)) / (1 - p(known))``: score centering (arXiv 2609.20807),
    equations 9, 12 and 14 as slime's documentation cites them.  The unknown ids are modelled as ``q = rho p``.  Since
    the scores ``p_v d log p_v`` of all ids add up to zero, the sum over unknown ids is minus the one over known ids.

    Where ``mask_T`` is false the loss is 0.  The second result is ``sum_v |q_v f - alpha p_v|``, a constant.
    """
    tokens_I, num_tokens = known.tokens_I, len(logprobs_T)
    p_I, q_I = known.logprobs_I.detach().exp(), known.behaviour_I.exp()
    known_p_T, known_q_T = _sums(p_I, tokens_I, num_tokens), _sums(q_I, tokens_I, num_tokens)
    rho_T = (1 - known_q_T).clamp(min=SMALLEST_TAIL) / (1 - known_p_T).clamp(min=SMALLEST_TAIL)
    alpha_T = rho_T * weight(1 / rho_T)
    coefficients_I = q_I * weight(_ratio(known.logprobs_I.detach(), known.behaviour_I)) - alpha_T[tokens_I] * p_I
    mean_T = _sums(coefficients_I * known.logprobs_I, tokens_I, num_tokens)
    own_T = weight(_ratio(logprobs_T.detach(), torch.where(mask_T, behaviour_T, logprobs_T.detach())))
    losses_T = -advantages_T * (own_T * logprobs_T - mean_T)
    return torch.where(mask_T, losses_T, 0.0), _sums(coefficients_I.abs(), tokens_I, num_tokens)


def _ratio(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    return (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sums(values_I: Tensor, tokens_I: Tensor, num_tokens: int) -> Tensor:
    return values_I.new_zeros(num_tokens).index_add(0, tokens_I, values_I)
