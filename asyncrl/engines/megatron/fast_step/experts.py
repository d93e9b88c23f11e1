"""Stacked experts against a loop over experts, and the two kernels around their products against torch.

Shape letters: as in ``mixture_ops``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.engines.megatron.fast_step.differences import Difference, largest, limit_of, relative, worst
from asyncrl.engines.megatron.fast_step.sizes import ExpertSizes, StepSizes
from asyncrl.engines.megatron.model.experts import apply_experts
from asyncrl.engines.megatron.model.mixture_ops import order_of, permute, plain_gather_sum, plain_swiglu, unpermute

GatherSum = Callable[[Tensor, Tensor], Tensor]
Swiglu = Callable[[Tensor, Tensor], Tensor]

NUM_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The inputs of a layer of experts."""

    tokens_TH: Tensor
    map_TE: Tensor
    """True at the chosen experts of each token."""
    probs_TE: Tensor
    weight1_EFH: Tensor
    weight2_EHF: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The inputs that have a gradient."""
        return {
            "tokens": self.tokens_TH,
            "routing weights": self.probs_TE,
            "first matrices": self.weight1_EFH,
            "second matrices": self.weight2_EHF,
        }


Mixed = Callable[[Routed], Tensor]


def mixed(given: Routed) -> Tensor:
    """Apply stacked experts to their tokens, and add up the results of each token's experts."""
    num_chosen = int(given.map_TE[0].sum())
    order = order_of(given.map_TE, num_chosen)
    rows_NH = permute(given.tokens_TH, order)
    weights_N = order.weights(given.probs_TE)
    return unpermute(apply_experts(rows_NH, order.ends_E, weights_N, given.weight1_EFH, given.weight2_EHF), order)


def compare_experts(sizes: StepSizes, own: ExpertSizes, apply: Mixed) -> Difference:
    """Compare the output of a layer and its gradients."""
    given, grad_TH = _routed(sizes, own), sizes.normal(NUM_TOKENS, sizes.hidden_size, seed=35)
    leaves = given.leaves
    for leaf in leaves.values():
        leaf.requires_grad_()
    out_TH = apply(given)
    grads = dict(zip(leaves, torch.autograd.grad(out_TH, list(leaves.values()), grad_TH), strict=True))
    values = _differences_of_loop(sizes, given, out_TH.detach(), grads, grad_TH.to(sizes.exact_dtype))
    limit = limit_of(sizes.dtype)
    return largest([Difference(what=what, value=value, limit=limit) for what, value in values.items()])


def compare_gather_sum(sizes: StepSizes, own: ExpertSizes, gather_sum: GatherSum) -> Difference:
    """Compare the sums of each token's rows."""
    num_rows = NUM_TOKENS * own.num_chosen
    rows_NH = sizes.normal(num_rows, sizes.hidden_size, seed=40)
    places_N = torch.randperm(num_rows, generator=torch.Generator().manual_seed(41))
    places_TK = places_N.view(NUM_TOKENS, own.num_chosen).to(sizes.device)
    exact = plain_gather_sum(rows_NH.to(sizes.exact_dtype), places_TK)
    return worst({"output": gather_sum(rows_NH, places_TK)}, {"output": exact}, limit_of(sizes.dtype))


def compare_swiglu(sizes: StepSizes, own: ExpertSizes, swiglu: Swiglu) -> Difference:
    """Compare outputs and gradients of the activation."""
    num_rows = NUM_TOKENS * own.num_chosen
    x_NF = sizes.normal(num_rows, 2 * own.ffn_hidden_size, seed=42)
    weights_N = sizes.normal(num_rows, seed=43).float().sigmoid()
    grad_NF = sizes.normal(num_rows, own.ffn_hidden_size, seed=44)
    found = _activated(swiglu, x_NF, weights_N, grad_NF)
    precise = (each.to(sizes.exact_dtype) for each in (x_NF, weights_N, grad_NF))
    return worst(found, _activated(plain_swiglu, *precise), limit_of(sizes.dtype))


def _routed(sizes: StepSizes, own: ExpertSizes) -> Routed:
    """Draw inputs; later experts have more tokens, and the first one has none unless every token needs it."""
    generator = torch.Generator().manual_seed(30)
    scores_TE = torch.randn(NUM_TOKENS, own.num_experts, generator=generator) + torch.linspace(0, 2, own.num_experts)
    scores_TE[:, 0] = -torch.inf
    map_TE = torch.zeros(scores_TE.shape, dtype=torch.bool)
    map_TE.scatter_(1, scores_TE.topk(own.num_chosen).indices, True)
    probs_TE = torch.rand(scores_TE.shape, generator=generator) * map_TE
    ffn, hidden = own.ffn_hidden_size, sizes.hidden_size
    return Routed(
        tokens_TH=sizes.normal(NUM_TOKENS, hidden, seed=31),
        map_TE=map_TE.to(sizes.device),
        probs_TE=probs_TE.to(sizes.device),
        weight1_EFH=sizes.normal(own.num_experts, 2 * ffn, hidden, seed=32, factor=hidden**-0.5),
        weight2_EHF=sizes.normal(own.num_experts, hidden, ffn, seed=33, factor=ffn**-0.5),
    )


def _differences_of_loop(
    sizes: StepSizes, given: Routed, out_TH: Tensor, grads: dict[str, Tensor], grad_TH: Tensor
) -> dict[str, float]:
    """Run one expert after the other, so that exact copies of one expert's matrices exist at a time."""
    tokens_TH, probs_TE = (
        each.detach().to(sizes.exact_dtype).requires_grad_() for each in (given.tokens_TH, given.probs_TE)
    )
    exact_TH, tokens_grad_TH, probs_grad_TE = (torch.zeros_like(each) for each in (tokens_TH, tokens_TH, probs_TE))
    first, second = list[float](), list[float]()
    for expert in range(len(given.weight1_EFH)):
        matrices = [
            each[expert].detach().to(sizes.exact_dtype).requires_grad_()
            for each in (given.weight1_EFH, given.weight2_EHF)
        ]
        part_TH = _of_expert(tokens_TH, probs_TE[:, expert], given.map_TE[:, expert], *matrices)
        own = torch.autograd.grad(part_TH, (tokens_TH, probs_TE, *matrices), grad_TH)
        exact_TH += part_TH.detach()
        tokens_grad_TH += own[0]
        probs_grad_TE += own[1]
        first.append(relative(grads["first matrices"][expert], own[2]))
        second.append(relative(grads["second matrices"][expert], own[3]))
    return {
        "output": relative(out_TH, exact_TH),
        "gradient of the tokens": relative(grads["tokens"], tokens_grad_TH),
        "gradient of the routing weights": relative(grads["routing weights"], probs_grad_TE),
        "gradient of the first matrices": _largest_or_nan(first),
        "gradient of the second matrices": _largest_or_nan(second),
    }


def _largest_or_nan(values: Sequence[float]) -> float:
    """Return the largest value; NaN if there is one, which ``max`` may leave out."""
    return next((value for value in values if math.isnan(value)), max(values))


def _of_expert(
    tokens_TH: Tensor, probs_T: Tensor, is_chosen_T: Tensor, weight1_FH: Tensor, weight2_HF: Tensor
) -> Tensor:
    """Return one expert's weighted output for the tokens that chose it, and 0 for the others."""
    places_N = is_chosen_T.nonzero()[:, 0]
    gate_NF, up_NF = (tokens_TH[places_N] @ weight1_FH.t()).chunk(2, -1)
    rows_NH = (F.silu(gate_NF) * up_NF) @ weight2_HF.t() * probs_T[places_N, None]
    return torch.zeros_like(tokens_TH).index_add(0, places_N, rows_NH)


def _activated(swiglu: Swiglu, x_NF: Tensor, weights_N: Tensor, grad_NF: Tensor) -> dict[str, Tensor]:
    leaves = [each.detach().requires_grad_() for each in (x_NF, weights_N)]
    out_NF = swiglu(*leaves)
    x_grad_NF, weight_grad_N = torch.autograd.grad(out_NF, leaves, grad_NF)
    return {
        "output": out_NF.detach(),
        "gradient of the inputs": x_grad_NF,
        "gradient of the routing weights": weight_grad_N,
    }
