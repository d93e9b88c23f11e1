"""The places of a model's parts on the ranks; ``gathering`` joins the parts.

A weight's name has the layer and expert numbers of the whole model, on every rank.  Every rank of the trainer must call
the functions marked "Collective" with the same arguments.  With one rank for each copy of the model, they send nothing.
"""

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from asyncrl.engines.megatron.model.experts import GroupedExperts
from asyncrl.engines.megatron.model.implementation import unfused

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=local_experts\.)\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One weight of the whole model."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole weight."""
    dtype: torch.dtype
    stage: int
    """The pipeline stage that has it."""
    expert_rank: int | None
    """The expert-parallel rank that has it; None: all of them."""


def is_split() -> bool:
    """Whether a copy of the model spans several ranks."""
    groups = (parallel_state.get_model_parallel_group(), parallel_state.get_expert_model_parallel_group())
    return any(group.size() > 1 for group in groups)


def local_weights(model: GPTModel, wanted: Set[str] | None = None) -> dict[str, Tensor]:
    """Return this rank's parts by name: parameters, and the router's bias that chooses experts.

    Each expert's matrices are views of the stacked parameters.  ``wanted`` limits the parts to these names.
    """
    return {name: part() for name, part in _parts(model) if wanted is None or name in wanted}


def generic(name: str) -> tuple[str, dict[str, int]]:
    """Return a weight's name as rules have it, and the layer and expert numbers that were in it."""
    numbers = {}
    for what, pattern in (("layer", _LAYER), ("expert", _EXPERT)):
        if found := pattern.search(name):
            numbers[what] = int(found[0])
            name = pattern.sub(f"{{{what}}}", name)
    return name, numbers


def all_weights(parts: dict[str, Tensor], splits: dict[str, str]) -> tuple[Weight, ...]:
    """List every weight of the whole model, in the same order on every rank, from every rank's ``parts``.  Collective.

    ``splits`` has the split of each generic name.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    mine = []
    for name, part in parts.items():
        is_expert = bool(_EXPERT.search(name))
        mine.append(
            Weight(
                name=name,
                shape=_whole_shape(part, splits[generic(name)[0]], group_of(is_expert=is_expert).size()),
                dtype=part.dtype,
                stage=stage,
                expert_rank=expert_rank if is_expert else None,
            )
        )
    for group in (
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        mine = list(chain(*_everyones(mine, group)))
    first: dict[str, Weight] = {}
    for weight in mine:  # a tied output layer is also on the last stage, other weights on every expert-parallel rank
        first.setdefault(weight.name, weight)
    return tuple(first.values())


def group_of(*, is_expert: bool) -> Any:
    """Return the group over which the weights of experts, or all other weights, are split."""
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def part_for_this_rank(name: str, whole: Tensor, split: str) -> Tensor:
    """Return this rank's part of the weight ``name``."""
    group = group_of(is_expert=bool(_EXPERT.search(name)))
    if group.size() == 1 or split == "whole":
        return whole
    if split == "pair":
        return torch.cat([half.chunk(group.size())[group.rank()] for half in whole.chunk(2)])
    part: Tensor = whole.chunk(group.size(), dim=1 if split == "columns" else 0)[group.rank()]
    return part


def _parts(model: GPTModel) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the name of each part, with a function that returns the part, in the model's order."""
    stacked = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, GroupedExperts)}
    seen: set[str] = set()
    for name, parameter in model.named_parameters():
        prefix = name[: name.rfind(".") + 1]
        if prefix not in stacked:
            yield _global_name(name, model), partial(_same, parameter)
        elif prefix not in seen:  # the parts of all parameters of the experts come with the first one
            seen.add(prefix)
            yield from ((_global_name(prefix + part, model), make) for part, make in stacked[prefix].parts())
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            yield _global_name(name, model), partial(_same, buffer)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _global_name(name: str, model: GPTModel) -> str:
    name = unfused(name)
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    if found := _LAYER.search(name):
        name = _LAYER.sub(str(model.decoder.layers[int(found[0])].layer_number - 1), name)
    if found := _EXPERT.search(name):
        per_rank = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        offset = per_rank * parallel_state.get_expert_model_parallel_rank()
        name = _EXPERT.sub(str(offset + int(found[0])), name)
    return name


def _whole_shape(part: Tensor, split: str, num_parts: int) -> tuple[int, ...]:
    sizes = list(part.shape)
    if split != "whole":
        sizes[1 if split == "columns" else 0] *= num_parts
    return tuple(sizes)


def _everyones(mine: list[Weight], group: Any) -> list[list[Weight]]:
    if group.size() == 1:
        return [mine]
    found: list[list[Weight]] = [[] for _ in range(group.size())]
    dist.all_gather_object(found, mine, group=group)
    return found
