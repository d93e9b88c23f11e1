"""Log-probs and entropies of response tokens, computed without all float32 logits in memory at once.

Shape letters: R response tokens, H hidden size, V this rank's part of the vocabulary.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 512 * 1024**2
"""Bytes of float32 logits at a time: 900 tokens at a vocabulary size of 150,000, enough for a full-speed product."""


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    temperature: float,
    group: Any = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target and the entropy of each distribution, float32, in nats.

    Logits are hidden states times ``weight_VH``, divided by ``temperature``.  The ranks of ``group`` have equal parts
    of the vocabulary, in order.  All of them must call this.  Each gets the whole result, and its vocabulary part's
    share of the gradient of ``hidden_RH``.  The backward pass recomputes each chunk's logits.  Entropies have a
    gradient only with ``entropy_gradient``.
    """
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, targets_R, temperature, group
    )
    logprobs_R, entropies_R = found
    return logprobs_R, entropies_R if entropy_gradient else entropies_R.detach()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor, temperature: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        group = group if group is not None and group.size() > 1 else None
        local_R = targets_R - (group.rank() * len(weight_VH) if group else 0)
        size = max(1, CHUNK_BYTES // (4 * len(weight_VH)))
        chunks = [
            _read(_logits(hidden, weight_VH, temperature), local, group)
            for hidden, local in zip(hidden_RH.split(size), local_R.split(size), strict=True)  # type: ignore[no-untyped-call]
        ]
        logprobs_R, entropies_R, log_totals_R = map(torch.cat, zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_RH, weight_VH, local_R, log_totals_R, entropies_R)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return logprobs_R, entropies_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, local_R, log_totals_R, entropies_R = ctx.saved_tensors
        for_logprobs_R, for_entropies_R = grads
        if for_logprobs_R is None:
            for_logprobs_R = torch.zeros_like(log_totals_R)
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for start in range(0, len(hidden_RH), ctx.size):
            here = slice(start, start + ctx.size)
            hidden = hidden_RH[here]
            entropy_grad = None if for_entropies_R is None else for_entropies_R[here]
            logits = _logits(hidden, weight_VH, ctx.temperature)
            found = (local_R[here], log_totals_R[here], entropies_R[here])
            slope = _slope(logits, *found, for_logprobs_R[here], entropy_grad)
            slope = (slope / ctx.temperature).to(hidden.dtype)
            torch.mm(slope, weight_VH, out=grad_hidden_RH[here])
            _add_product(grad_weight_VH, slope, hidden)
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _logits(hidden_RH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    return (hidden_RH @ weight_VH.t()).float().div_(temperature)


def _read(logits_RV: Tensor, local_R: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and log-sum-exps of the logits."""
    largest_R = logits_RV.amax(-1)
    if group:
        dist.all_reduce(largest_R, dist.ReduceOp.MAX, group=group)
    exp_RV = (logits_RV - largest_R.unsqueeze(-1)).exp_()
    is_here_R = (local_R >= 0) & (local_R < logits_RV.shape[-1])
    target_R = logits_RV.gather(-1, torch.where(is_here_R, local_R, 0).unsqueeze(-1)).squeeze(-1)
    sums_3R = torch.stack([exp_RV.sum(-1), torch.where(is_here_R, target_R, 0.0), (exp_RV.mul_(logits_RV)).sum(-1)])
    if group:
        dist.all_reduce(sums_3R, group=group)
    total_R, target_R, weighted_R = sums_3R
    log_totals_R = largest_R + total_R.log()
    return target_R - log_totals_R, log_totals_R - weighted_R / total_R, log_totals_R


def _slope(
    logits_RV: Tensor,
    local_R: Tensor,
    log_totals_R: Tensor,
    entropies_R: Tensor,
    for_logprobs_R: Tensor,
    for_entropies_R: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits, which it overwrites.

    With p the probabilities and H the entropy, the target's log-prob has the gradient ``1[target] - p``, and the
    entropy has ``-p (log p + H)``.
    """
    logs_RV = logits_RV.sub_(log_totals_R.unsqueeze(-1))
    factor_RV: Tensor = -for_logprobs_R.unsqueeze(-1)
    if for_entropies_R is not None:
        factor_RV = factor_RV - for_entropies_R.unsqueeze(-1) * (logs_RV + entropies_R.unsqueeze(-1))
    slope_RV = logs_RV.exp_().mul_(factor_RV)
    is_here_R = (local_R >= 0) & (local_R < slope_RV.shape[-1])
    at_target_R = torch.where(is_here_R, for_logprobs_R, 0.0)
    return slope_RV.scatter_add_(-1, torch.where(is_here_R, local_R, 0).unsqueeze(-1), at_target_R.unsqueeze(-1))


def _add_product(total_VH: Tensor, slope_RV: Tensor, hidden_RH: Tensor) -> None:
    """Add ``slope.T @ hidden`` to the total in float32, whatever the dtype of the factors."""
    if slope_RV.dtype == torch.float32:
        total_VH.addmm_(slope_RV.t(), hidden_RH)
    elif slope_RV.is_cuda:
        torch.addmm(total_VH, slope_RV.t(), hidden_RH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH += slope_RV.t() @ hidden_RH
