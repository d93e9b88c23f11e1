"""The log-prob head against a softmax over all logits at once.

Shape letters: as in ``logprobs``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.engines.megatron.fast_step.differences import Difference, absolute, largest, limit_of, relative
from asyncrl.engines.megatron.fast_step.sizes import HeadSizes, StepSizes
from asyncrl.engines.megatron.model.logprobs import FurtherIds, TokenLogprobs

Head = Callable[..., TokenLogprobs]
"""A function with the signature of ``token_logprobs``."""

_COUNTS = np.array([3, 0, 1, 5, 0, 2] * 16, np.int32)
"""Number of further ids of each token."""
_SHARED_SEED, _OWN_SEED = 10, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    hidden_RH: Tensor
    weight_VH: Tensor
    targets_R: Tensor
    further: FurtherIds
    factors: tuple[Tensor, ...]
    """Factors on log-probs, entropies and log-probs of further ids; the sum of all products is the loss."""


def compare_head(sizes: StepSizes, own: HeadSizes, head: Head) -> Difference:
    """Compare log-probs, entropies and gradients.  All ranks of ``own.group`` must call this."""
    given = _inputs(sizes, own)
    leaves = [given.hidden_RH.requires_grad_(), given.weight_VH.requires_grad_()]
    results = head(*leaves, given.targets_R, own.temperature, own.group, entropy_gradient=True, further=given.further)
    grads = torch.autograd.grad(_loss(results, given.factors), leaves)
    exact, exact_grads = _exact(sizes, own, given)
    limit = limit_of(sizes.dtype)
    names = ("log-probs", "entropies", "log-probs of further ids")
    values = {
        f"{name} (nats)": absolute(one, other)
        for name, one, other in zip(names, _results(results), _results(exact), strict=True)
    }
    for name, one, other in zip(("hidden states", "output matrix"), grads, exact_grads, strict=True):
        values[f"gradient of the {name}"] = relative(one, other)
    return largest([Difference(what=what, value=value, limit=limit) for what, value in values.items()])


def alone(own: HeadSizes) -> HeadSizes:
    """Return the sizes of a head whose vocabulary is this rank's part: without collective operations."""
    return replace(own, group=None)


def plain_logprobs(logits_RV: Tensor, targets_R: Tensor, further: FurtherIds) -> TokenLogprobs:
    """Compute the results from the logits of the whole vocabulary, divided by the temperature."""
    logs_RV = logits_RV.log_softmax(-1)
    return TokenLogprobs(
        logprobs_R=logs_RV.gather(1, targets_R[:, None])[:, 0],
        entropies_R=-(logs_RV.exp() * logs_RV).sum(-1),
        further_N=logs_RV[further.rows_N, further.ids_N],
    )


def _inputs(sizes: StepSizes, own: HeadSizes) -> _Inputs:
    """Draw inputs whose logits, divided by the temperature, have the standard deviation 1."""
    num_tokens, num_ids = len(_COUNTS), own.vocab_size * own.num_parts
    generator = torch.Generator().manual_seed(_SHARED_SEED)
    targets_R = torch.randint(num_ids, (num_tokens,), generator=generator)
    edges = torch.tensor([0, own.vocab_size - 1, own.vocab_size % num_ids, num_ids - 1])
    targets_R[: len(edges)] = edges
    rows_N = torch.from_numpy(np.repeat(np.arange(num_tokens), _COUNTS))
    places_N = torch.from_numpy(np.concatenate([np.arange(count) for count in _COUNTS]))
    ids_N = (targets_R[rows_N] + places_N * (num_ids // (int(_COUNTS.max()) + 1))) % num_ids
    factors = [torch.randn(count, generator=generator) for count in (num_tokens, num_tokens, len(ids_N))]
    return _Inputs(
        hidden_RH=sizes.normal(num_tokens, sizes.hidden_size, seed=_SHARED_SEED, is_shared=True),
        weight_VH=sizes.normal(
            own.vocab_size,
            sizes.hidden_size,
            seed=_OWN_SEED + own.first,
            factor=own.temperature / sizes.hidden_size**0.5,
        ),
        targets_R=targets_R.to(sizes.device),
        further=FurtherIds(counts_R=_COUNTS, ids_N=ids_N.to(sizes.device)),
        factors=tuple(each.to(sizes.device) for each in factors),
    )


@torch.no_grad()
def _exact(sizes: StepSizes, own: HeadSizes, given: _Inputs) -> tuple[TokenLogprobs, tuple[Tensor, Tensor]]:
    """Compute the results from gathered logits, and this rank's share of the gradients."""
    hidden_RH, weight_VH = given.hidden_RH.to(sizes.exact_dtype), given.weight_VH.to(sizes.exact_dtype)
    mine_RV = hidden_RH @ weight_VH.t() / own.temperature
    logits_RV = _gathered(mine_RV, own.group).requires_grad_()
    with torch.enable_grad():
        results = plain_logprobs(logits_RV, given.targets_R, given.further)
        (slope_RV,) = torch.autograd.grad(_loss(results, given.factors), logits_RV)
    slope_RV = slope_RV[:, own.first : own.first + own.vocab_size] / own.temperature
    return results, (slope_RV @ weight_VH, slope_RV.t() @ hidden_RH)


def _gathered(mine_RV: Tensor, group: Any) -> Tensor:
    if group is None:
        return mine_RV
    parts = [torch.empty_like(mine_RV) for _ in range(group.size())]
    dist.all_gather(parts, mine_RV.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _results(found: TokenLogprobs) -> tuple[Tensor, Tensor, Tensor]:
    assert found.further_N is not None, "asked for"
    return found.logprobs_R, found.entropies_R, found.further_N


def _loss(found: TokenLogprobs, factors: tuple[Tensor, ...]) -> Tensor:
    products = [(each * by.to(each.dtype)).sum() for each, by in zip(_results(found), factors, strict=True)]
    return torch.stack(products).sum()
