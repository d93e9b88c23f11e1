"""Log-probs and entropies of response tokens, computed without all logits in memory at once.

    hidden states x output matrix ──▶ logits of some tokens ──▶ log-prob, entropy, log-probs of further ids
                                            ▲ computed again in the backward pass

On GPUs in bfloat16, one Triton kernel reads the logits of a token once, and another one replaces them by their
gradient (``head_kernels``).  Everywhere else the same is computed in float32 by torch.
Shape letters: R response tokens, H hidden size, V this rank's part of the vocabulary, N further ids of all tokens,
n those of the tokens of one chunk.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.megatron.model.triton_kernels import can_use_triton
from asyncrl.engines.megatron.setup.transfer import on_device

CHUNK_BYTES = 512 * 1024**2
"""Bytes of float32 logits at a time: 900 tokens at a vocabulary size of 150,000, enough for a full-speed product."""
FUSED_CHUNK_BYTES = 384 * 1024**2
"""Bytes of bfloat16 logits at a time for the kernels: 1,300 tokens, enough for a full-speed product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherIds:
    """Further ids of each response token, token after token.  The ids of one token are distinct."""

    counts_R: NDArray[np.int32]
    """Number of ids of each token, on the host: chunks are cut without a wait for the GPU."""
    ids_N: Tensor
    """Ids of the whole vocabulary."""

    @property
    def rows_N(self) -> Tensor:
        """The token of each id."""
        return on_device(np.repeat(np.arange(len(self.counts_R)), self.counts_R), self.ids_N.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Float32 results, in nats."""

    logprobs_R: Tensor
    """Log-prob of each target."""
    entropies_R: Tensor
    further_N: Tensor | None = None
    """Log-probs of the further ids."""


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    temperature: float,
    group: Any = None,
    *,
    entropy_gradient: bool = False,
    further: FurtherIds | None = None,
    is_fused: bool | None = None,
) -> TokenLogprobs:
    """Compute the log-prob of each target and of further ids, and the entropy of each distribution.

    Logits are hidden states times ``weight_VH``, divided by ``temperature``.  The ranks of ``group`` have equal parts
    of the vocabulary, in order.  All of them must call this.  Each gets the whole result, and its vocabulary part's
    share of the gradient of ``hidden_RH``.  The backward pass recomputes each chunk's logits.  Entropies have a
    gradient only with ``entropy_gradient``.  ``is_fused`` chooses the kernels; None: wherever they run.
    """
    if is_fused is None:
        is_fused = can_use_triton(hidden_RH) and weight_VH.dtype == hidden_RH.dtype
    counts_R = np.zeros(len(hidden_RH), np.int64) if further is None else further.counts_R
    ids_N = targets_R.new_zeros(0) if further is None else further.ids_N
    head = _Head(temperature=temperature, group=_shared(group), counts_R=counts_R, is_fused=is_fused)
    found: tuple[Tensor, Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_RH, weight_VH, targets_R, ids_N, head
    )
    logprobs_R, entropies_R, further_N = found
    return TokenLogprobs(
        logprobs_R=logprobs_R,
        entropies_R=entropies_R if entropy_gradient else entropies_R.detach(),
        further_N=None if further is None else further_N,
    )


def over_kept_ids(found: TokenLogprobs, kept_N: Tensor, rows_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs and entropies of the policy that draws among the kept ids of each token only.

    ``kept_N`` are the log-probs of the kept ids over the whole vocabulary, and ``rows_N`` their tokens.  With K the
    kept ids, the log-prob is ``log p_t - log sum_K p``.  The target must be one of them: its log-prob would otherwise
    be that of no distribution.  A token without kept ids is drawn from the whole vocabulary.

    Also returns the log of the kept probability of each token, ``log sum_K p``.
    """
    num_tokens = len(found.logprobs_R)
    largest_R = torch.full_like(found.logprobs_R, -torch.inf)
    largest_R = largest_R.scatter_reduce(0, rows_N, kept_N.detach(), "amax")
    is_limited_R = largest_R.isfinite()
    largest_R = torch.where(is_limited_R, largest_R, 0.0)
    sums_R = kept_N.new_zeros(num_tokens).index_add(0, rows_N, (kept_N - largest_R[rows_N]).exp())
    mass_R = torch.where(is_limited_R, largest_R + torch.where(is_limited_R, sums_R, 1.0).log(), 0.0)
    within_N = kept_N - mass_R[rows_N]
    entropies_R = kept_N.new_zeros(num_tokens).index_add(0, rows_N, -within_N.exp() * within_N)
    return found.logprobs_R - mass_R, torch.where(is_limited_R, entropies_R, found.entropies_R), mass_R


def _shared(group: Any) -> Any:
    return group if group is not None and group.size() > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The settings of one pass."""

    temperature: float
    group: Any
    counts_R: NDArray[Any]
    is_fused: bool

    def chunks(self, hidden_RH: Tensor, weight_VH: Tensor) -> list[tuple[slice, slice]]:
        """Cut the tokens and their further ids."""
        num_bytes = FUSED_CHUNK_BYTES // 2 if self.is_fused else CHUNK_BYTES // 4
        size = max(1, num_bytes // len(weight_VH))
        edges = [*range(0, len(hidden_RH), size), len(hidden_RH)] if len(hidden_RH) else [0, 0]
        ends = np.concatenate([[0], np.cumsum(self.counts_R, dtype=np.int64)])
        return [(slice(start, stop), slice(int(ends[start]), int(ends[stop]))) for start, stop in pairwise(edges)]

    def logits(self, hidden_RH: Tensor, weight_VH: Tensor) -> Tensor:
        """Return logits: float32 and divided by the temperature, or as the kernels take them.

        Behind them is room for one more number.
        """
        num_logits = len(hidden_RH) * len(weight_VH)
        dtype = hidden_RH.dtype if self.is_fused else torch.float32
        room = torch.empty(num_logits + 1, dtype=dtype, device=hidden_RH.device)
        logits_RV = room[:num_logits].view(len(hidden_RH), len(weight_VH))
        if dtype == hidden_RH.dtype:
            torch.mm(hidden_RH, weight_VH.t(), out=logits_RV)
        else:
            logits_RV.copy_(hidden_RH @ weight_VH.t())
        return logits_RV if self.is_fused else logits_RV.div_(self.temperature)

    def at(self, logits_RV: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Return the logits at local ids, divided by the temperature; 0 where another rank has the id."""
        is_here = (ids >= 0) & (ids < logits_RV.shape[-1])
        values = logits_RV[rows, torch.where(is_here, ids, 0)].float()
        return torch.where(is_here, values / self.temperature if self.is_fused else values, 0.0)

    def sums(self, logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's largest logit, and the sums of exp(logit - largest), alone and times the logit."""
        if self.is_fused:
            from asyncrl.engines.megatron.model.head_kernels import row_sums

            return row_sums(logits_RV, self.temperature)
        largest_R = logits_RV.amax(-1)
        exp_RV = (logits_RV - largest_R.unsqueeze(-1)).exp_()
        total_R = exp_RV.sum(-1)
        return largest_R, total_R, exp_RV.mul_(logits_RV).sum(-1)

    def slope(self, logits_RV: Tensor, local_R: Tensor, given: "_Given") -> Tensor:
        """Put the gradient of the logits, without that of the further ids, in place of the logits."""
        if self.is_fused:
            from asyncrl.engines.megatron.model.head_kernels import slopes

            return slopes(logits_RV, local_R, given.columns(), self.temperature)
        logs_RV = logits_RV.sub_(given.log_totals_R.unsqueeze(-1))
        factor_RV = given.factor_R.unsqueeze(-1)
        if given.for_entropies_R is not None:
            factor_RV = factor_RV - given.for_entropies_R.unsqueeze(-1) * (logs_RV + given.entropies_R.unsqueeze(-1))
        slope_RV = logs_RV.exp_().mul_(factor_RV)
        is_here_R = (local_R >= 0) & (local_R < slope_RV.shape[-1])
        at_target_R = torch.where(is_here_R, given.for_logprobs_R, 0.0)
        slope_RV.scatter_add_(-1, torch.where(is_here_R, local_R, 0).unsqueeze(-1), at_target_R.unsqueeze(-1))
        return slope_RV.div_(self.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The inputs of the gradient of some tokens' logits.

    With p the probabilities and H the entropy, the log-prob of id i has the gradient ``1[i] - p``, and the entropy has
    ``-p (log p + H)``.  All ids together: ``p (factor - g_H (log p + H)) + g_i``, with factor the negative sum of g_i.
    """

    log_totals_R: Tensor
    entropies_R: Tensor
    factor_R: Tensor
    for_logprobs_R: Tensor
    for_entropies_R: Tensor | None

    def columns(self) -> tuple[Tensor, ...]:
        """Return the five numbers of each token."""
        grads_R = torch.zeros_like(self.factor_R) if self.for_entropies_R is None else self.for_entropies_R
        return self.log_totals_R, self.entropies_R, self.factor_R, self.for_logprobs_R, grads_R

    def shared_part(self, logits_n: Tensor, rows_n: Tensor) -> Tensor:
        """Return the gradient of single logits without their ``g_i``."""
        logs_n = logits_n - self.log_totals_R[rows_n]
        factor_n = self.factor_R[rows_n]
        if self.for_entropies_R is not None:
            factor_n = factor_n - self.for_entropies_R[rows_n] * (logs_n + self.entropies_R[rows_n])
        return logs_n.exp() * factor_n


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RH: Tensor, weight_VH: Tensor, targets_R: Tensor, ids_N: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = head.group.rank() * len(weight_VH) if head.group else 0
        local_R, local_N = targets_R - first, ids_N - first
        chunks = [
            _read(head, head.logits(hidden_RH[here], weight_VH), local_R[here], local_N[those], head.counts_R[here])
            for here, those in head.chunks(hidden_RH, weight_VH)
        ]
        logprobs_R, entropies_R, log_totals_R, further_N = map(torch.cat, zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_RH, weight_VH, local_R, local_N, log_totals_R, entropies_R)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprobs_R, entropies_R, further_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, local_R, local_N, log_totals_R, entropies_R = ctx.saved_tensors
        head: _Head = ctx.head
        for_logprobs_R, for_entropies_R, for_further_N = grads
        if for_logprobs_R is None:
            for_logprobs_R = torch.zeros_like(log_totals_R)
        if for_further_N is None:
            for_further_N = log_totals_R.new_zeros(len(local_N))
        grad_hidden_RH = torch.empty_like(hidden_RH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        for here, those in head.chunks(hidden_RH, weight_VH):
            hidden, rows = hidden_RH[here], _rows(head.counts_R[here], local_N.device)
            own, further = for_logprobs_R[here], for_further_N[those]
            given = _Given(
                log_totals_R=log_totals_R[here],
                entropies_R=entropies_R[here],
                factor_R=-own.index_add(0, rows, further),
                for_logprobs_R=own,
                for_entropies_R=None if for_entropies_R is None else for_entropies_R[here],
            )
            slope = _slope(head, head.logits(hidden, weight_VH), local_R[here], local_N[those], rows, further, given)
            slope = slope.to(hidden.dtype)
            torch.mm(slope, weight_VH, out=grad_hidden_RH[here])
            _add_product(grad_weight_VH, slope, hidden)
        return grad_hidden_RH, grad_weight_VH.to(weight_VH.dtype), None, None, None


def _read(
    head: _Head, logits_RV: Tensor, local_R: Tensor, local_n: Tensor, counts_R: NDArray[Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, log-sum-exps of the logits, and log-probs of the further ids."""
    num_tokens, rows_n = len(logits_RV), _rows(counts_R, local_n.device)
    own_R, total_R, weighted_R = head.sums(logits_RV)
    largest_R = own_R
    if head.group:
        largest_R = own_R.clone()
        dist.all_reduce(largest_R, dist.ReduceOp.MAX, group=head.group)
    share_R = (own_R - largest_R).exp()
    every = torch.arange(num_tokens, device=rows_n.device)
    target_R, further_n = head.at(logits_RV, every, local_R), head.at(logits_RV, rows_n, local_n)
    sums = torch.cat([total_R * share_R, weighted_R * share_R, target_R, further_n])
    if head.group:
        dist.all_reduce(sums, group=head.group)
    total_R, weighted_R, target_R, further_n = torch.split(sums, [num_tokens] * 3 + [len(rows_n)])
    log_totals_R = largest_R + total_R.log()
    return (
        target_R - log_totals_R,
        log_totals_R - weighted_R / total_R,
        log_totals_R,
        further_n - log_totals_R[rows_n],
    )


def _rows(counts_R: NDArray[Any], device: torch.device) -> Tensor:
    """Return the token of each further id."""
    return on_device(np.repeat(np.arange(len(counts_R)), counts_R), device)


def _slope(
    head: _Head, logits_RV: Tensor, local_R: Tensor, local_n: Tensor, rows_n: Tensor, further_n: Tensor, given: _Given
) -> Tensor:
    """Put the gradient of the logits in their place.

    The numbers at further ids are written whole: terms of opposite sign cancel there, and in bfloat16 a sum of rounded
    terms would be mostly error.
    """
    if not len(rows_n):
        return head.slope(logits_RV, local_R, given)
    is_here_n = (local_n >= 0) & (local_n < logits_RV.shape[-1])
    end = logits_RV.numel()
    places_n = torch.where(is_here_n, rows_n * logits_RV.shape[-1] + local_n, end)
    is_target_n = local_n == local_R[rows_n]
    at_ids_n = given.shared_part(head.at(logits_RV, rows_n, local_n), rows_n) + further_n
    at_ids_n = at_ids_n + torch.where(is_target_n, given.for_logprobs_R[rows_n], 0.0)
    slope_RV = head.slope(logits_RV, local_R, given)
    # One element behind the last row takes what belongs to other ranks, without a wait for the number of ids here.
    with_spare = slope_RV.as_strided((end + 1,), (1,))
    with_spare[places_n] = (at_ids_n / head.temperature).to(slope_RV.dtype)
    return slope_RV


def _add_product(total_VH: Tensor, slope_RV: Tensor, hidden_RH: Tensor) -> None:
    """Add ``slope.T @ hidden`` to the total in float32, whatever the dtype of the factors."""
    if slope_RV.dtype == torch.float32:
        total_VH.addmm_(slope_RV.t(), hidden_RH)
    elif slope_RV.is_cuda:
        torch.addmm(total_VH, slope_RV.t(), hidden_RH, out_dtype=torch.float32, out=total_VH)
    else:
        total_VH += slope_RV.t() @ hidden_RH
