"""Fast operations that are slightly wrong, and the plain ones of a CPU in the place of kernels."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.fast_step.check import FastOperations
from asyncrl.engines.megatron.fast_step.experts import Routed, mixed
from asyncrl.engines.megatron.fast_step.updates import foreach_norm, fused_adam
from asyncrl.engines.megatron.model.attention_kernels import Stretches, attended_one_by_one
from asyncrl.engines.megatron.model.logprobs import TokenLogprobs, token_logprobs
from asyncrl.engines.megatron.model.mixture_ops import plain_gather_sum, plain_swiglu

PLAIN = FastOperations(
    attend=attended_one_by_one,
    head=token_logprobs,
    gather_sum=plain_gather_sum,
    swiglu=plain_swiglu,
    norm=foreach_norm,
    make_adam=fused_adam,
)
"""All operations of a step: those of a GPU too."""


def _other_scale(query: Tensor, key: Tensor, value: Tensor, stretches: Stretches, scale: float) -> Tensor:
    return attended_one_by_one(query, key, value, stretches, 1.1 * scale)


def _one_wrong_head(query: Tensor, key: Tensor, value: Tensor, stretches: Stretches, scale: float) -> Tensor:
    out_TAV = attended_one_by_one(query, key, value, stretches, scale).clone()
    out_TAV[-1, -1] += 1.0
    return out_TAV


def _hot(*given: Any, **asked: Any) -> TokenLogprobs:
    hidden, weight, targets, temperature, group = given
    return token_logprobs(hidden, weight, targets, 1.2 * temperature, group, **asked)


def _without_entropy_gradient(*given: Any, **asked: Any) -> TokenLogprobs:
    return token_logprobs(*given, **asked | {"entropy_gradient": False})


def _without_last_id(hidden: Tensor, weight: Tensor, *given: Any, **asked: Any) -> TokenLogprobs:
    return token_logprobs(hidden, torch.cat([weight[:-1], weight[:1]]), *given, **asked)


def less_entropy_in_a_group(*given: Any, **asked: Any) -> TokenLogprobs:
    """Compute entropies that are too small where several ranks share the vocabulary."""
    found, (*_, group) = token_logprobs(*given, **asked), given
    return found if group is None else replace(found, entropies_R=0.9 * found.entropies_R)


def not_a_number(hidden: Tensor, *given: Any, **asked: Any) -> TokenLogprobs:
    """Compute log-probs of hidden states with a NaN."""
    return token_logprobs(hidden * torch.nan, *given, **asked)


def _without_last_column(rows_NH: Tensor, places_TK: Tensor) -> Tensor:
    out_TH = plain_gather_sum(rows_NH, places_TK)
    out_TH[:, -1] = 0
    return out_TH


def _unweighted(x_NF: Tensor, weights_N: Tensor) -> Tensor:
    return plain_swiglu(x_NF, weights_N * 0 + 0.5)


def _neighbour(given: Routed) -> Tensor:
    """Apply the experts' second matrices in another order."""
    return mixed(replace(given, weight2_EHF=given.weight2_EHF.roll(1, 0)))


def _detached(given: Routed) -> Tensor:
    """Apply the experts without the gradient of half of the tokens."""
    half = len(given.tokens_TH) // 2
    tokens = torch.cat([given.tokens_TH[:half], given.tokens_TH[half:].detach()])
    return mixed(replace(given, tokens_TH=tokens))


def _nan_in_one_gradient(given: Routed) -> Tensor:
    """Apply the experts, and put NaN in the gradient of the first one's matrix."""
    weight1_EFH = given.weight1_EFH * 1
    first = torch.tensor([0], device=weight1_EFH.device)
    weight1_EFH.register_hook(lambda grad: grad.index_fill(0, first, torch.nan))  # type: ignore[no-untyped-call]
    return mixed(replace(given, weight1_EFH=weight1_EFH))


def _first_dtype(gradients: Sequence[Tensor]) -> Tensor:
    return foreach_norm([each for each in gradients if each.dtype == gradients[0].dtype])


def _other_beta(parameters: Sequence[torch.nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    return fused_adam(parameters, replace(train, adam_beta2=0.9))


def fails(*given: Any, **asked: Any) -> Any:
    """Raise as a kernel does that cannot be compiled."""
    raise RuntimeError("no kernel image is available\nfor execution on the device")


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "attention with another scale": ("FlashAttention 2", {"attend": _other_scale}),
    "attention with one wrong head of one token": ("FlashAttention 2", {"attend": _one_wrong_head}),
    "attention that fails": ("FlashAttention 2", {"attend": fails}),
    "head with another temperature": ("log-prob head", {"head": _hot}),
    "head without the gradient of entropies": ("log-prob head", {"head": _without_entropy_gradient}),
    "head without the last id": ("log-prob head", {"head": _without_last_id}),
    "head with NaN": ("log-prob head", {"head": not_a_number}),
    "sums without the last column": ("gather-and-sum of experts", {"gather_sum": _without_last_column}),
    "activation without weights": ("SwiGLU of experts", {"swiglu": _unweighted}),
    "experts in another order": ("stacked experts", {"experts": _neighbour}),
    "experts without some gradients": ("stacked experts", {"experts": _detached}),
    "experts with NaN in one gradient": ("stacked experts", {"experts": _nan_in_one_gradient}),
    "norm of one dtype": ("gradient norm", {"norm": _first_dtype}),
    "AdamW with another beta": ("fused AdamW", {"make_adam": _other_beta}),
}
"""The name of each wrong operation, and the field of ``FastOperations`` to replace."""
