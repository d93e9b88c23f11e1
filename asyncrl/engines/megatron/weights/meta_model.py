"""Which weights a model has and where a torch_dist checkpoint has them, without memory for a single one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.overrides import TorchFunctionMode

from asyncrl.engines.megatron.checkpoint.state import sharded_weights
from asyncrl.engines.megatron.model.build import build_model
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
    """One weight of the whole model."""

    name: str
    whole: Tensor
    """Its shape and dtype; it has no numbers."""
    sharded: ShardedTensor | ShardedTensorFactory
    """Megatron's words for where it is: one tensor of the checkpoint, a part of one, or several parts."""

    def parts(self, numbers: Tensor) -> list[ShardedTensor]:
        """``numbers``, the whole weight, as the parts that a checkpoint has."""
        return list(nested_values([self._built(numbers)]))

    def joined(self, read: Callable[[ShardedTensor], Tensor]) -> Tensor:
        """The whole weight, of parts that ``read`` gets."""
        found = dict_list_map_outplace(read, self._built(self.whole))
        whole: Tensor = self.sharded.merge_fn(found) if isinstance(self.sharded, ShardedTensorFactory) else found
        return whole

    def _built(self, numbers: Tensor) -> Any:
        sharded = replace(self.sharded, data=numbers)
        return sharded.build() if isinstance(sharded, ShardedTensorFactory) else sharded


def placed_weights(shape: ModelShape) -> tuple[list[Placed], list[ShardedObject]]:
    """Every weight of ``shape``'s model in its dtype, and what else Megatron looks for beside them.

    Needs Megatron's groups, in a layout that splits no model.
    """
    with _Unstored():
        model = build_model(shape, _META, getattr(torch, shape.dtype))
        state = sharded_weights(model)["model"]
    weights = [
        Placed(name=name, whole=each.data, sharded=each)
        for name, each in state.items()
        if not isinstance(each, ShardedObject)
    ]
    objects = [each for each in state.values() if isinstance(each, ShardedObject)]
    return weights, [*objects, ShardedObject("common_state", {}, (1,), (0,))]


def share(weights: Sequence[Placed], rank: int, num_ranks: int) -> list[Placed]:
    """The part of ``weights`` that falls to ``rank``: neighbours, about as many bytes as to any other."""
    total, before, mine = sum(weight.whole.nbytes for weight in weights), 0, []
    for weight in weights:
        if before * num_ranks // total == rank:
            mine.append(weight)
        before += weight.whole.nbytes
    return mine


class _Unstored(TorchFunctionMode):
    """While it is entered, new tensors have a shape and no memory, whatever device Megatron names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            kwargs["device"] = _META
        return func(*args, **kwargs)


_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor, torch.arange})
