"""Loading and saving of Hugging Face checkpoints in a Megatron model, by the rules of the model's family."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from asyncrl.engines.megatron.checkpoint.hf_files import dtypes_of, reader, replace_checkpoint
from asyncrl.engines.megatron.weights.fp8 import BlockFp8
from asyncrl.engines.megatron.weights.gathering import whole_weights
from asyncrl.engines.megatron.weights.sharding import (
    Weight,
    all_weights,
    generic,
    is_split,
    local_weights,
    part_for_this_rank,
)
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.expert_parts import part_of_expert
from asyncrl.errors import ConfigError
from asyncrl.internals import Internal
from asyncrl.models.families import FAMILIES, Rule
from asyncrl.models.overrides import changes
from asyncrl.models.shape import ModelShape, read_config

INTERNALS = (
    Internal(
        name="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        attributes=("main_param",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
        attributes=("main_param",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)


@torch.no_grad()
def load_hf(model: GPTModel, shape: ModelShape, checkpoint: Path) -> None:
    """Fill every weight of this rank's ``model`` from the safetensors in ``checkpoint``.  Raises ConfigError."""
    if shape.num_next_token_layers:
        logger.warning(
            "%s: its %d layers for multi-token prediction are not trained and not saved",
            checkpoint,
            shape.num_next_token_layers,
        )
    with ExitStack() as files:
        read = reader(checkpoint, files, shape.fp8_block)
        for name, part in local_weights(model).items():
            rule, hf_names = _named(name, shape)
            whole = from_hf(name, read, shape)
            tensor = part_for_this_rank(name, whole, rule.split)
            if tensor.shape != part.shape:
                raise ConfigError(
                    f"hf-checkpoint: {', '.join(hf_names)} have the shape {tuple(tensor.shape)} together, "
                    f"config.json requires {tuple(part.shape)}"
                )
            part.copy_(tensor)


def from_hf(name: str, read: Callable[[str], Tensor], shape: ModelShape) -> Tensor:
    """Build the whole weight ``name`` from the checkpoint's tensors, which ``read`` returns by name.

    The inverse of ``to_hf``.
    """
    rule, hf_names = _named(name, shape)
    return _stacked([read(hf_name) for hf_name in hf_names], rule, shape)


@torch.no_grad()
def export_hf(model: GPTModel, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint by name, in a fixed order.

    A tensor is float32 if one rank has the whole model and its optimizer has a float32 copy.  If the model spans
    several ranks, that copy is not used, because its split may differ from rank to rank.
    Collective: every rank must exhaust the iterator, and gets every tensor.
    """
    parts = local_weights(model)
    if not is_split():
        parts = {name: _finest(part) for name, part in parts.items()}
    splits = splits_of(shape)
    for name, tensor in whole_weights(parts, all_weights(parts, splits), splits, next(model.parameters()).device):
        yield from to_hf(name, tensor, shape)


def to_hf(name: str, tensor: Tensor, shape: ModelShape) -> list[tuple[str, Tensor]]:
    """Split the whole weight ``name`` into the checkpoint's tensors; views where possible."""
    rule, hf_names = _named(name, shape)
    parts: Iterable[Tensor] = parts_of(name, tensor, shape)
    if rule.layout == "heads":
        parts = (part.flatten(0, 1) for part in parts)
    return list(zip(hf_names, parts, strict=True))


def parts_of(name: str, tensor: Tensor, shape: ModelShape) -> tuple[Tensor, ...]:
    """Return views of the whole weight ``name``, one for each of the checkpoint's tensors, with elements in its order.

    Queries, keys and values have one more dimension in front: the query groups.
    """
    rule, hf_names = _named(name, shape)
    if rule.layout == "stacked":
        return tensor.detach().chunk(len(hf_names))
    per_group = shape.num_heads // shape.num_query_groups
    sizes = [per_group * shape.head_dim, shape.head_dim, shape.head_dim]
    grouped = tensor.detach().view(shape.num_query_groups, sum(sizes), *tensor.shape[1:])
    return torch.split(grouped, sizes, dim=1)


def plan_buckets(
    model: GPTModel, shape: ModelShape, max_bytes: int, fp8: BlockFp8 | None = None, num_parts: int = 1
) -> tuple[tuple[WeightBucket, ...], tuple[tuple[Weight, ...], ...]]:
    """Plan the contents of each bucket, and the weights that it is made from, for ``export_bucket``.  Collective.

    Weights keep the model's order.  Weights that SGLang needs together share a bucket.  A weight larger than
    ``max_bytes`` has a bucket to itself.  ``fp8`` has the tensors that are sent in FP8.  Experts of different parts of
    ``num_parts`` never share a bucket with each other, nor with other weights; the order holds within each part.
    """
    plan: list[tuple[int | None, list[Weight]]] = []
    last: dict[int | None, tuple[list[Weight], int]] = {}
    for together in _units(all_weights(local_weights(model), splits_of(shape)), shape):
        part = _part_of(together, shape, num_parts)
        num_bytes = _bucket(together, shape, fp8).num_bytes
        weights, free = last.get(part, ([], 0))
        if not weights or num_bytes > free:
            weights, free = [], max_bytes
            plan.append((part, weights))
        weights.extend(together)
        last[part] = weights, free - num_bytes
    buckets = tuple(replace(_bucket(weights, shape, fp8), expert_part=part) for part, weights in plan)
    return buckets, tuple(tuple(weights) for _, weights in plan)


@torch.no_grad()
def export_bucket(
    model: GPTModel, shape: ModelShape, weights: Sequence[Weight], fp8: BlockFp8 | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one bucket, in the dtype that the model computes in, or in FP8.  Collective."""
    device = next(model.parameters()).device
    parts = local_weights(model, {weight.name for weight in weights})
    for name, tensor in whole_weights(parts, weights, splits_of(shape), device):
        yield from _sent(name, tensor, shape, fp8)


def save_hf(model: GPTModel, shape: ModelShape, source: Path, target: Path) -> None:
    """Write a checkpoint that transformers can load, each tensor in the dtype that it has in ``source``.

    Collective; rank 0 writes.  ``target`` appears, or is replaced, when it is complete.  Tensors that are in FP8 in
    ``source`` become ``shape.dtype``.

    The written ``config.json`` has the values of the flags that override ``source/config.json``.  Layers for
    multi-token prediction are left out, and ``config.json`` has a count of 0 for them.
    """
    tensors = export_hf(model, shape)
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    dtypes = dtypes_of(source)
    default = getattr(torch, shape.dtype)
    converted = ((name, tensor.to(dtypes.get(name, default))) for name, tensor in tensors)
    replace_checkpoint(converted, source, target, saved_changes(source, shape))


def saved_changes(source: Path, shape: ModelShape) -> dict[str, Any]:
    """Return the keys of ``config.json`` that a saved checkpoint changes from ``source``; None removes a key."""
    altered = sent_changes(source, shape)
    if shape.fp8_block:
        altered["quantization_config"] = None
    return altered


def sent_changes(source: Path, shape: ModelShape) -> dict[str, Any]:
    """Return the same keys for weights sent to engines, which are quantized as in ``source``."""
    altered = changes(read_config(source), shape)
    if shape.num_next_token_layers:
        altered["num_nextn_predict_layers"] = 0
    return altered


def _units(weights: Iterable[Weight], shape: ModelShape) -> list[list[Weight]]:
    """Group the weights that must share a bucket, in order."""
    units: list[list[Weight]] = []
    for weight in weights:
        if units and _named(units[-1][-1].name, shape)[0].sent_with_next:
            units[-1].append(weight)
        else:
            units.append([weight])
    return units


def _part_of(together: Iterable[Weight], shape: ModelShape, num_parts: int) -> int | None:
    """Return the expert part of weights that share a bucket; None if they are not the experts of one part."""
    if num_parts == 1 or shape.experts is None or shape.experts.num_experts % num_parts:
        return None
    experts = [generic(weight.name)[1].get("expert") for weight in together]
    size = shape.experts.num_experts
    parts = {None if expert is None else part_of_expert(expert, size, num_parts) for expert in experts}
    return parts.pop() if len(parts) == 1 else None


def _finest(part: Tensor) -> Tensor:
    """Return the optimizer's float32 copy if it has the whole weight, otherwise the weight itself."""
    main: Tensor | None = getattr(part, "main_param", None)
    return main.view(part.shape) if main is not None and main.numel() == part.numel() else part


def splits_of(shape: ModelShape) -> dict[str, str]:
    """Return the split of each weight of the family, by the weight's name in the rules."""
    return {rule.megatron: rule.split for rule in FAMILIES[shape.architecture].rules}


def _named(name: str, shape: ModelShape) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule for the weight ``name``, and the checkpoint's names of its tensors."""
    pattern, numbers = generic(name)
    rule = {rule.megatron: rule for rule in FAMILIES[shape.architecture].rules}[pattern]
    return rule, tuple(hf_name.format(**numbers) for hf_name in rule.hf)


def _stacked(parts: list[Tensor], rule: Rule, shape: ModelShape) -> Tensor:
    if rule.layout == "stacked":
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    groups = [part.reshape(shape.num_query_groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _sent(name: str, tensor: Tensor, shape: ModelShape, fp8: BlockFp8 | None) -> Iterable[tuple[str, Tensor]]:
    tensors = to_hf(name, tensor, shape)
    return tensors if fp8 is None else fp8.stored(tensors)


def _bucket(weights: Sequence[Weight], shape: ModelShape, fp8: BlockFp8 | None) -> WeightBucket:
    whole = ((weight.name, torch.empty(weight.shape, dtype=weight.dtype, device="meta")) for weight in weights)
    tensors = list(chain.from_iterable(_sent(name, tensor, shape, fp8) for name, tensor in whole))
    return WeightBucket(
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        num_bytes=sum(tensor.nbytes for _, tensor in tensors),
    )
