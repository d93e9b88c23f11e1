"""The attention kernel against torch's attention, answer by answer.

Shape letters: as in ``attention_kernels``.
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from asyncrl.engines.megatron.fast_step.differences import Difference, limit_of, worst
from asyncrl.engines.megatron.fast_step.sizes import AttentionSizes, StepSizes
from asyncrl.engines.megatron.model.attention_kernels import Stretches, attended_one_by_one

Attend = Callable[[Tensor, Tensor, Tensor, Stretches, float], Tensor]

_ANSWERS = (300, 77, 512, 1, 130)
"""Tokens of the answers: one alone, and others below and above the 128 tokens of a kernel's tile."""
_HALVES = (75, 200, 1)
"""With context parallelism, tokens of each of an answer's two pieces on a rank."""


def compare_attention(sizes: StepSizes, attend: Attend) -> Difference:
    """Compare outputs and gradients for random queries, keys and values."""
    own = sizes.attention
    num_tokens, num_keys = _lengths(own)
    stretches = stretches_of(num_tokens, num_keys, sizes.device)
    shapes = {
        "queries": (sum(num_tokens), own.num_heads, own.query_width),
        "keys": (sum(num_keys), own.num_kv_heads, own.query_width),
        "values": (sum(num_keys), own.num_kv_heads, own.value_width),
    }
    inputs = {name: sizes.normal(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    grad_TAV = sizes.normal(sum(num_tokens), own.num_heads, own.value_width, seed=3)
    found = _attended(attend, inputs, grad_TAV, stretches, own.scale)
    precise = {name: tensor.to(sizes.exact_dtype) for name, tensor in inputs.items()}
    exact = _attended(attended_one_by_one, precise, grad_TAV.to(sizes.exact_dtype), stretches, own.scale)
    return worst(found, exact, limit_of(sizes.dtype))


def stretches_of(num_tokens: tuple[int, ...], num_keys: tuple[int, ...], device: torch.device) -> Stretches:
    """Build stretches of so many tokens and keys."""
    edges = [torch.tensor([0, *accumulate(each)], device=device, dtype=torch.int32) for each in (num_tokens, num_keys)]
    return Stretches(
        token_edges=edges[0], key_edges=edges[1], longest_tokens=max(num_tokens), longest_keys=max(num_keys)
    )


def _lengths(own: AttentionSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens and the keys of each stretch."""
    if own.context_size == 1:
        return _ANSWERS, _ANSWERS
    pieces = (own.context_rank + 1, 2 * own.context_size - own.context_rank)
    return tuple(half for half in _HALVES for _ in pieces), tuple(half * count for half in _HALVES for count in pieces)


def _attended(
    attend: Attend, inputs: dict[str, Tensor], grad_TAV: Tensor, stretches: Stretches, scale: float
) -> dict[str, Tensor]:
    query, key, value = leaves = [tensor.detach().requires_grad_() for tensor in inputs.values()]
    out_TAV = attend(query, key, value, stretches, scale)
    grads = torch.autograd.grad(out_TAV, leaves, grad_TAV)
    gradients = {f"gradient of the {name}": grad for name, grad in zip(inputs, grads, strict=True)}
    return {"output": out_TAV.detach(), **gradients}
