"""The weights of a model and their places in a torch_dist checkpoint, without memory for any of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asyncrl.engines.megatron.checkpoint.state import sharded_weights
from asyncrl.engines.megatron.model.build import build_model
from asyncrl.engines.megatron.model.experts import expert_names, expert_places
from asyncrl.internals import Internal
from asyncrl.models.shape import ModelShape

INTERNALS = (
    Internal(
        name="megatron.core.dist_checkpointing.dict_utils.dict_list_map_outplace",
        parameters=("f", "x"),
        used_in=__name__,
    ),
    Internal(name="megatron.core.dist_checkpointing.dict_utils.nested_values", parameters=("x",), used_in=__name__),
    Internal(
        name="megatron.core.dist_checkpointing.mapping.ShardedTensorFactory",
        keywords=("key", "data", "build_fn", "merge_fn"),
        attributes=("build",),
        used_in=__name__,
    ),
    Internal(
        name="torch.overrides.TorchFunctionMode.__torch_function__",
        parameters=("self", "func", "types", "args", "kwargs"),
        is_exact=True,
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One weight of the whole model, with its place in a checkpoint."""

    name: str
    whole: Tensor
    """A tensor with its shape and dtype, but without data."""
    sharded: ShardedTensor | ShardedTensorFactory
    """Megatron's description of its place: one tensor of the checkpoint, a part of one, or several parts."""

    def parts(self, numbers: Tensor) -> list[ShardedTensor]:
        """Split ``numbers``, the whole weight, into the parts that a checkpoint has."""
        return list(nested_values([self._built(numbers)]))

    def joined(self, read: Callable[[ShardedTensor], Tensor]) -> Tensor:
        """Join the whole weight from the parts that ``read`` returns."""
        found = dict_list_map_outplace(read, self._built(self.whole))
        whole: Tensor = self.sharded.merge_fn(found) if isinstance(self.sharded, ShardedTensorFactory) else found
        return whole

    def _built(self, numbers: Tensor) -> Any:
        sharded = replace(self.sharded, data=numbers)
        return sharded.build() if isinstance(sharded, ShardedTensorFactory) else sharded


def placed_weights(shape: ModelShape) -> tuple[list[Placed], list[ShardedObject]]:
    """Return every weight of ``shape``'s model in its dtype, and the objects that Megatron expects in addition.

    Needs Megatron's process groups, in a layout that does not split the model.
    """
    with _Unstored():
        model = build_model(shape, _META, getattr(torch, shape.dtype))
        state = sharded_weights(model)["model"]
    weights = list(
        chain.from_iterable(_placed(name, each) for name, each in state.items() if not isinstance(each, ShardedObject))
    )
    objects = [each for each in state.values() if isinstance(each, ShardedObject)]
    return weights, [*objects, ShardedObject("common_state", {}, (1,), (0,))]


def _placed(name: str, sharded: ShardedTensor | ShardedTensorFactory) -> list[Placed]:
    """Return the weight ``name``, or each expert's matrix if it is a parameter of several experts."""
    places = expert_places(sharded)
    if places is None:
        return [Placed(name=name, whole=sharded.data, sharded=sharded)]
    each = places.split(sharded)
    return [
        Placed(name=one, whole=part.data, sharded=part)
        for one, part in zip(expert_names(name, len(each)), each, strict=True)
    ]


def share(weights: Sequence[Placed], rank: int, num_ranks: int) -> list[Placed]:
    """Return the share of ``rank``: consecutive ``weights`` with about as many bytes as any other rank's share."""
    total, before, mine = sum(weight.whole.nbytes for weight in weights), 0, []
    for weight in weights:
        if before * num_ranks // total == rank:
            mine.append(weight)
        before += weight.whole.nbytes
    return mine


class _Unstored(TorchFunctionMode):
    """A mode in which new tensors have a shape but no memory, whatever device Megatron names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            kwargs["device"] = _META
        return func(*args, **kwargs)


_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange})
