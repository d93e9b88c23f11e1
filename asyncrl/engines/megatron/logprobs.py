"""Log-probs and entropies of response tokens, without ever holding their float32 logits all at once.

Shape letters: R response tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 512
"""Tokens whose logits exist at a time: 300 MB in float32 for 150,000 words, and enough for a full-speed product."""


def token_logprobs(
    hidden_RH: Tensor,
    project: Callable[[Tensor], Tensor],
    targets_R: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, float32, in nats.

    ``project`` makes logits of hidden states; they are divided by ``temperature``.  The backward pass computes each
    chunk's logits anew.  Entropies have a gradient only with ``entropy_gradient``.
    """
    chunks = zip(hidden_RH.split(CHUNK), targets_R.split(CHUNK), strict=True)  # type: ignore[no-untyped-call]
    rows = [
        checkpoint(
            _chunk,
            hidden,
            project,
            targets,
            temperature,
            entropy_gradient,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for hidden, targets in chunks
    ]
    logprobs, entropies = zip(*rows, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden_RH: Tensor,
    project: Callable[[Tensor], Tensor],
    targets_R: Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits_RV = project(hidden_RH).float() / temperature
    log_total_R = logits_RV.logsumexp(-1)
    logprobs_R = logits_RV.gather(-1, targets_R.unsqueeze(-1)).squeeze(-1) - log_total_R
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probs_RV = (logits_RV - log_total_R.unsqueeze(-1)).exp()
        entropies_R = log_total_R - (probs_RV * logits_RV).sum(-1)
    return logprobs_R, entropies_R
