"""Operations of a mixture of experts around its two matrix products, with their gradients.

    order       the rows of tokens sorted by expert, without a host synchronisation
    permute     one gather: a row for each expert of each token; backward, one gather-and-sum
    unpermute   one gather-and-sum: each token's rows; backward, one gather
    swiglu      silu(gate) * up * routing weight, in one pass

Each operation has a plain form in torch.  Triton kernels (``mixture_kernels``) compute ``gather_sum`` and ``swiglu``
for 16-bit tensors on a GPU; float32 tensors and CPUs use the plain forms.  megatron-core scatters with atomic
additions instead, which took 58 ms of a 1.1 s step (6.2B, one H200); gathers took 5 ms.

Shape letters: T tokens, K experts of a token, E experts, N rows sent to experts (T K if no other rank has experts),
H hidden size, F an expert's FFN hidden size.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """The rows sent to experts, sorted by expert, and by token within an expert."""

    sources_N: Tensor
    """The token of each row."""
    places_TK: Tensor
    """The rows of each token."""
    experts_N: Tensor
    """The expert of each row, int16."""
    ends_E: Tensor
    """The end of each expert's rows, int32."""

    def weights(self, probs_TE: Tensor) -> Tensor:
        """Return the routing weight of each row, differentiably."""
        flat_N = self.sources_N * probs_TE.shape[1] + self.experts_N
        return probs_TE.reshape(-1).index_select(0, flat_N)


def order_of(map_TE: Tensor, k: int) -> RowOrder:
    """Sort the rows of ``map_TE``, which has ``k`` experts for each token."""
    chosen_TK = map_TE.to(torch.int8).topk(k, dim=-1, sorted=False).indices
    return _sorted(chosen_TK.reshape(-1).to(torch.int16), k, map_TE.shape[1])


def order_of_chunks(counts_CE: Tensor, num_rows: int) -> RowOrder:
    """Sort received rows, which are in C chunks, one for each sender, and within a chunk by expert."""
    chunks, experts = counts_CE.shape
    each_E = torch.arange(experts, device=counts_CE.device, dtype=torch.int16)
    experts_N = each_E.repeat(chunks).repeat_interleave(counts_CE.reshape(-1), output_size=num_rows)
    return _sorted(experts_N, 1, experts)


def permute(tokens_TH: Tensor, order: RowOrder) -> Tensor:
    """Return the row of each token for each of its experts, sorted by expert."""
    rows_NH: Tensor = _Permute.apply(tokens_TH, order.sources_N, order.places_TK)  # type: ignore[no-untyped-call]
    return rows_NH


def unpermute(rows_NH: Tensor, order: RowOrder) -> Tensor:
    """Return for each token the sum of its rows.  The inverse of ``permute`` with one expert for each token."""
    tokens_TH: Tensor = _Unpermute.apply(rows_NH, order.sources_N, order.places_TK)  # type: ignore[no-untyped-call]
    return tokens_TH


def swiglu(x_NF: Tensor, weights_N: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` times each row's weight; a row of ``x_NF`` has the gate and then the up projection."""
    if not uses_kernels(x_NF):
        return plain_swiglu(x_NF, weights_N)
    out_NF: Tensor = _Swiglu.apply(x_NF, weights_N)  # type: ignore[no-untyped-call]
    return out_NF


def plain_swiglu(x_NF: Tensor, weights_N: Tensor) -> Tensor:
    """``swiglu`` in torch."""
    gate_NF, up_NF = x_NF.chunk(2, -1)
    return (F.silu(gate_NF) * up_NF * weights_N.unsqueeze(-1)).to(x_NF.dtype)


def gather_sum(rows_NH: Tensor, places_TK: Tensor) -> Tensor:
    """Return for each token the sum of the rows at its places."""
    if places_TK.shape[1] == 1:
        return rows_NH.index_select(0, places_TK[:, 0])
    if uses_kernels(rows_NH):
        return _kernels().gather_sum(rows_NH, places_TK)  # type: ignore[no-any-return]
    return plain_gather_sum(rows_NH, places_TK)


def plain_gather_sum(rows_NH: Tensor, places_TK: Tensor) -> Tensor:
    """``gather_sum`` in torch."""
    return rows_NH.index_select(0, places_TK.reshape(-1)).view(*places_TK.shape, -1).sum(1)


def uses_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels compute with ``tensor``."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _kernels() is not None


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton kernels; None if triton is not installed."""
    try:
        from asyncrl.engines.megatron.model import mixture_kernels
    except ImportError:
        return None
    return mixture_kernels


def _sorted(experts: Tensor, k: int, num_experts: int) -> RowOrder:
    """Sort rows that are in the order of tokens, ``k`` for each.  int16 is sorted twice as fast as int64."""
    experts_N, order_N = experts.sort(stable=True)
    each_E = torch.arange(num_experts, device=experts.device, dtype=torch.int16)
    places_N = torch.empty_like(order_N)
    places_N[order_N] = torch.arange(len(order_N), device=experts.device)
    return RowOrder(
        sources_N=order_N if k == 1 else order_N // k,
        places_TK=places_N.view(-1, k),
        experts_N=experts_N,
        ends_E=torch.searchsorted(experts_N, each_E, right=True, out_int32=True),
    )


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, sources_N: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return tokens_TH.index_select(0, sources_N)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor, None, None]:
        (places_TK,) = ctx.saved_tensors
        return gather_sum(grad_NH, places_TK), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_NH: Tensor, sources_N: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(sources_N)
        return gather_sum(rows_NH, places_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        (sources_N,) = ctx.saved_tensors
        return grad_TH.index_select(0, sources_N), None, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, weights_N: Tensor) -> Tensor:
        ctx.save_for_backward(x_NF, weights_N)
        return _kernels().swiglu(x_NF, weights_N.float())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
        x_NF, weights_N = ctx.saved_tensors
        x_grad_NF, weight_grad_N = _kernels().swiglu_backward(x_NF, weights_N.float(), grad_NF)
        return x_grad_NF, weight_grad_N.to(weights_N.dtype)
