"""Policy and value losses, and the weights that make their sum the same mean under any packing.

A loss is ``sum(loss_T * weights_T) / count``.  The count is taken over the whole update: tokens for ``token_weights``,
rollouts for ``rollout_weights``.  The sum may be taken in any pieces, so neither packing nor data parallelism changes
it.  Policy losses return a loss per token, and whether its ratio was clipped.  Where ``mask_T`` is false they return
the loss of ratio 1, whatever the old log-probs are: tokens that no policy sampled may have any number there.
Shape letters: T response tokens, sample after sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.samples import from_host, sample_means

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio in either direction: exp(89) overflows float32, and inf times an advantage of 0 is NaN."""


def ppo_clip(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    eps_dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped loss ``-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)``.

    PPO (arXiv 1707.06347), equation 7.  The separate upper range is DAPO's (arXiv 2503.14476), "Clip-Higher".  With
    ``eps_dual`` (above 1), and where A is negative, the objective is at least ``eps_dual * A``: dual clip
    (arXiv 1912.09729).
    """
    log_ratio_T = held_log_ratio(logprobs_T, old_logprobs_T, mask_T)
    return _clipped(log_ratio_T.exp(), advantages_T, mask_T, eps_low, eps_high, eps_dual)


def gspo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int],
    *,
    eps_low: float,
    eps_high: float,
    eps_dual: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``ppo_clip`` with one ratio per sample, the geometric mean over its trained tokens.

    ``s = (pi(y) / pi_old(y))^(1/|y|)``: GSPO (arXiv 2507.18071), equations 5 and 7.  Every token of a sample has the
    same loss, so that ``rollout_weights`` give the paper's objective.
    """
    log_ratio_T = sample_means(held_log_ratio(logprobs_T, old_logprobs_T, mask_T), mask_T, lengths)
    return _clipped(log_ratio_T.exp(), advantages_T, mask_T, eps_low, eps_high, eps_dual)


def cispo(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute the CISPO loss ``-sg(clip(ratio, 1 - eps_low, 1 + eps_high)) * A * log pi``.

    CISPO (MiniMax-M1, arXiv 2506.13585).  The ratio is a constant, so that clipped tokens keep their gradient.  The
    paper has no lower bound: ``eps_low`` 1.
    """
    ratio_T = held_log_ratio(logprobs_T.detach(), old_logprobs_T, mask_T).exp()
    held_T = ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high)
    return -held_T * advantages_T * logprobs_T, (held_T != ratio_T) & mask_T


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Compute the squared error of each value, and whether its move away from the old value was clipped.

    ``max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2)``: the value clipping of PPO's reference implementation
    (arXiv 2005.12729), without a factor of 1/2, as in slime.
    """
    held_T = old_values_T + (values_T - old_values_T).clamp(-clip, clip)
    loss_T = torch.maximum((values_T - returns_T).square(), (held_T - returns_T).square())
    return loss_T, (values_T - old_values_T).abs() > clip


def held_log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """Compute the log of the probability ratio, clamped to +-``MAX_LOG_RATIO``; 0 where ``mask_T`` is false."""
    return torch.where(mask_T, logprobs_T - old_logprobs_T, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_weights(mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return a weight of 1 for each trained token.  Raises ValueError if ``lengths`` do not add up to the tokens.

    With the number of trained tokens as the count, every token weighs the same.
    """
    if sum(lengths) != len(mask_T):
        raise ValueError(f"lengths add up to {sum(lengths)}, mask_T has {len(mask_T)} entries")
    return mask_T.to(torch.float32)


def rollout_weights(mask_T: Tensor, lengths: Sequence[int], rollout_tokens: Sequence[int]) -> Tensor:
    """Return a weight of 1 / n for each trained token of a rollout that has n of them over all its samples.

    ``rollout_tokens`` has the n of each sample's rollout, whose other samples may be in other microbatches or on other
    ranks.  With the number of rollouts as the count, every rollout weighs the same.  A rollout without trained tokens
    adds nothing, but counts as a rollout.
    """
    weights_T = token_weights(mask_T, lengths)
    if not lengths:  # an empty microbatch, which only matches other ranks' passes
        return weights_T
    device = mask_T.device
    counts_N = from_host(rollout_tokens, torch.float32, device).clamp(min=1.0)
    # A tensor as divisor: by a plain number, a GPU multiplies with its rounded inverse.
    return weights_T / counts_N.repeat_interleave(from_host(lengths, torch.long, device), output_size=len(mask_T))


def _clipped(
    ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, eps_low: float, eps_high: float, eps_dual: float | None
) -> tuple[Tensor, Tensor]:
    free_T = -ratio_T * advantages_T
    held_T = -ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages_T
    loss_T, clipped_T = torch.maximum(free_T, held_T), held_T > free_T
    if eps_dual is not None:
        most_T = -eps_dual * advantages_T
        is_over_T = (advantages_T < 0) & (loss_T > most_T)
        loss_T, clipped_T = torch.where(is_over_T, most_T, loss_T), clipped_T | is_over_T
    return loss_T, clipped_T & mask_T
