"""The clipped policy loss, and the weights that make its sum over any packing one and the same mean.

A loss is ``sum(loss_T * weights_T) / count`` with the count taken over the whole update: tokens for ``token_weights``,
samples for ``sample_weights``.  The sum may be taken in any pieces, so neither packing nor data parallelism changes it.
Shape letters: T response tokens, sample behind sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond it, in either direction, a log-ratio is held: exp(88) overflows, and inf times an advantage of 0 is NaN."""


def ppo_clip(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """Loss per token, and whether its ratio was clipped.

    ``-min(ratio * A, clip(ratio, 1 - eps_low, 1 + eps_high) * A)``: PPO (arXiv 1707.06347), equation 7, with the
    separate upper range of DAPO (arXiv 2503.14476), "Clip-Higher".  Where ``mask_T`` is false the result is that of
    ratio 1, whatever the log-probs there: tokens that no policy sampled may carry any number.
    """
    log_ratio_T = torch.where(mask_T, logprobs_T - old_logprobs_T, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    free_T = -ratio_T * advantages_T
    held_T = -ratio_T.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages_T
    return torch.maximum(free_T, held_T), (held_T > free_T) & mask_T


def token_weights(mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """1 for each token that counts: with the number of such tokens as the count, every token weighs the same."""
    if sum(lengths) != len(mask_T):
        raise ValueError(f"lengths add up to {sum(lengths)}, mask_T has {len(mask_T)} entries")
    return mask_T.to(torch.float32)


def sample_weights(mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """1 over the tokens of its sample that count: with the number of samples as count, every sample weighs the same.

    A sample without any such token adds nothing, but is one of the samples.
    """
    weights_T = token_weights(mask_T, lengths)
    if not lengths:  # an empty microbatch, which keeps the ranks in step
        return weights_T
    parts: tuple[Tensor, ...] = weights_T.split(list(lengths))  # type: ignore[no-untyped-call]
    return torch.cat([part / part.sum().clamp(min=1.0) for part in parts])
