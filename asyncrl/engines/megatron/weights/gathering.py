"""Whole weights, gathered from the ranks' parts.  One message carries many weights, because each costs its latency.

    tensor parallel   all-gather of all ranks' parts, which are concatenated
    expert parallel   broadcast of each rank's experts to all others
    pipeline          broadcast of each stage's layers to all others

A mixture of experts has thousands of weights of a few megabytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from asyncrl.engines.megatron.weights.sharding import Weight, generic, group_of
from asyncrl.engines.megatron.weights.update_group import flatten
from asyncrl.engines.weight_sync.flat import views

MESSAGE_BYTES = 2**28
"""The maximum size of the whole weights in one exchange, in bytes; a larger weight is exchanged alone.  An exchange of
this size takes a millisecond on NVLink, and for a moment several times as much memory."""


def whole_weights(
    parts: Mapping[str, Tensor],
    weights: Sequence[Weight],
    splits: Mapping[str, str],
    device: torch.device,
    message_bytes: int = MESSAGE_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole ``weights``, one at a time, from every rank's ``parts``, which are on ``device``.

    ``splits`` has the split of each generic name.  Collective; every rank gets every weight.
    """
    stages = parallel_state.get_pipeline_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    for batch in _batches(weights, message_bytes):
        here = [weight for weight in batch if weight.stage == stages.rank()]
        of_experts = [weight for weight in here if weight.expert_rank is not None]
        found = _joined(parts, [weight for weight in here if weight.expert_rank in (None, experts.rank())], splits)
        found |= _from_owners(found, of_experts, lambda weight: weight.expert_rank, experts, device)
        found |= _from_owners(found, batch, lambda weight: weight.stage, stages, device)
        for weight in batch:
            yield weight.name, found.pop(weight.name)


def _batches(weights: Sequence[Weight], message_bytes: int) -> Iterator[list[Weight]]:
    batch: list[Weight] = []
    free = message_bytes
    for weight in weights:
        size = prod(weight.shape) * weight.dtype.itemsize
        if batch and size > free:
            yield batch
            batch, free = [], message_bytes
        batch.append(weight)
        free -= size
    if batch:
        yield batch


def _joined(parts: Mapping[str, Tensor], weights: Sequence[Weight], splits: Mapping[str, str]) -> dict[str, Tensor]:
    """Gather the ``weights`` whose parts are on this rank and on the others of its tensor-parallel groups."""
    found = {weight.name: parts[weight.name].detach() for weight in weights}
    for is_expert, alike in groupby(_aligned(weights), key=lambda weight: weight.expert_rank is not None):
        split = [weight.name for weight in alike if splits[generic(weight.name)[0]] != "whole"]
        if split and (group := group_of(is_expert=is_expert)).size() > 1:
            everyones = zip(*_everyones([found[name] for name in split], group), strict=True)
            for name, pieces in zip(split, everyones, strict=True):
                found[name] = _side_by_side(pieces, splits[generic(name)[0]])
    return found


def _everyones(mine: Sequence[Tensor], group: Any) -> list[list[Tensor]]:
    """Gather each rank's counterparts of ``mine``, by rank of the group."""
    flat = flatten(mine)
    flats = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(flats, flat, group=group)
    return [views(each, [_name(one.dtype) for one in mine], [one.shape for one in mine]) for each in flats]


def _side_by_side(pieces: Sequence[Tensor], split: str) -> Tensor:
    if split == "pair":
        return torch.cat([piece.chunk(2)[half] for half in range(2) for piece in pieces])
    return torch.cat(list(pieces), dim=1 if split == "columns" else 0)


def _from_owners(
    held: Mapping[str, Tensor],
    weights: Sequence[Weight],
    owner: Callable[[Weight], int | None],
    group: Any,
    device: torch.device,
) -> dict[str, Tensor]:
    """Broadcast all ``weights``, each from the rank of ``group`` that holds it."""
    if group.size() == 1:
        return {}
    found: dict[str, Tensor] = {}
    for member in range(group.size()):
        theirs = _aligned([weight for weight in weights if owner(weight) == member])
        if not theirs:
            continue
        if member == group.rank():
            flat = flatten(held[weight.name] for weight in theirs)
        else:
            size = sum(prod(weight.shape) * weight.dtype.itemsize for weight in theirs)
            flat = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=dist.get_global_rank(group, member), group=group)
        whole = views(flat, [_name(weight.dtype) for weight in theirs], [weight.shape for weight in theirs])
        found |= {weight.name: tensor for weight, tensor in zip(theirs, whole, strict=True)}
    return found


def _aligned(weights: Sequence[Weight]) -> list[Weight]:
    """Sort weights of one group together, with larger elements first.

    Each weight of a group then begins at a multiple of its element size.
    """
    return sorted(weights, key=lambda weight: (weight.expert_rank is not None, -weight.dtype.itemsize))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
