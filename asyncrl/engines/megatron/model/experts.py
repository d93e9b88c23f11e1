"""The experts of a rank: one stacked parameter for each of their two matrices, and its parts in a checkpoint.

One parameter for each expert would cost a copy of all matrices in each pass, to multiply them in one product, and as
many gradient additions as experts: 89 ms and 9,480 calls in a step of 1.4 s (6.2B, one H200).

Names do not change: a checkpoint, an export and a weight update have one tensor for each expert and matrix, under the
names of Megatron's ``SequentialMLP``.

Shape letters: N rows sorted by expert, H hidden size, E experts of this rank, F an expert's FFN hidden size, of which
an expert-tensor-parallel rank has a part.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from asyncrl.engines.megatron.model.mixture_ops import swiglu
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.transformer.moe.experts.SequentialMLP.sharded_state_dict",
        parameters=("self", "prefix", "sharded_offsets", "metadata"),
        is_exact=True,
        attributes=("replica_id",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.layers.set_tensor_model_parallel_attributes",
        parameters=("tensor", "is_parallel", "dim", "stride"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.layers.ColumnParallelLinear",
        attributes=("allreduce", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.mapping.ShardedTensor.from_rank_offsets",
        parameters=("key", "data", "rank_offsets"),
        keywords=("replica_id", "prepend_axis_num"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.mapping.ShardedTensorFactory",
        keywords=("key", "data", "build_fn", "merge_fn", "replica_id"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.utils.make_sharded_object_for_checkpoint",
        parameters=("obj", "key", "sharded_offsets", "replica_id"),
        used_in=__name__,
    ),
    Internal(
        name="torch.nn.functional.grouped_mm", parameters=("mat_a", "mat_b"), keywords=("offs",), used_in=__name__
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_MATRICES = {"weight1": "linear_fc1", "weight2": "linear_fc2"}
"""The name of each parameter's matrices in Megatron's experts."""


def apply_experts(
    rows_NH: Tensor, ends_E: Tensor, weights_N: Tensor, weight1_EFH: Tensor, weight2_EHF: Tensor
) -> Tensor:
    """Apply stacked experts to rows sorted by expert, of which expert e has those before ``ends_E[e]``.

    Each expert of ``weight1_EFH`` has a gate projection and then an up projection.  ``weights_N`` weigh the outputs.
    """
    inner_NF = F.grouped_mm(rows_NH, weight1_EFH.transpose(1, 2), offs=ends_E)
    return F.grouped_mm(swiglu(inner_NF, weights_N), weight2_EHF.transpose(1, 2), offs=ends_E)


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The experts of this rank, with one grouped product for each of their two matrices.

    Megatron's grouped experts need TransformerEngine.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, name: str | None = None
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self._expert_group, self._tensor_group = pg_collection.ep, pg_collection.expt_tp
        self._data_group = pg_collection.expt_dp
        ffn = config.moe_ffn_hidden_size // self._tensor_group.size()
        self.weight1 = self._parameter((num_local_experts, 2 * ffn, config.hidden_size), split=1, stride=2)
        self.weight2 = self._parameter((num_local_experts, config.hidden_size, ffn), split=2, stride=1)
        self.register_load_state_dict_pre_hook(_without_extra_state)

    def forward(self, rows_NH: Tensor, ends_E: Tensor, weights_N: Tensor) -> tuple[Tensor, None]:
        """Apply the experts to rows sorted by expert, of which expert e has those before ``ends_E[e]``.

        ``weights_N`` weigh the outputs.
        """
        return apply_experts(rows_NH, ends_E, weights_N, self.weight1, self.weight2), None

    def parts(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield the name of each expert's matrix in ``SequentialMLP``, with a function that returns the matrix.

        The matrix is a view, with views of the gradient and of the optimizer's copy as attributes.  A view takes 10 us;
        a model may have tens of thousands of matrices.
        """
        for number in range(self.num_local_experts):
            for parameter, matrix in _MATRICES.items():
                yield _name(number, matrix), partial(_part, getattr(self, parameter), number)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the parameters as the tensors that ``SequentialMLP`` would have in a checkpoint.

        Megatron splits an optimizer's states by the same factories.
        """
        places = {
            parameter: ExpertPlaces(
                key=f"{prefix}experts.{matrix}.",
                is_pair=parameter == "weight1",
                layer=tuple(sharded_offsets),
                first=self._expert_group.rank() * self.num_local_experts,
                total=self._expert_group.size() * self.num_local_experts,
                tensor_rank=self._tensor_group.rank(),
                tensor_size=self._tensor_group.size(),
                data_rank=self._data_group.rank(),
            )
            for parameter, matrix in _MATRICES.items()
        }
        found: dict[str, Any] = {
            f"{prefix}{parameter}": place.factory(getattr(self, parameter)) for parameter, place in places.items()
        }
        for number in range(self.num_local_experts):
            for parameter, matrix in _MATRICES.items():
                name = f"{prefix}{_name(number, matrix)}".removesuffix("weight") + "_extra_state"
                found[name] = places[parameter].extra_state(number)
        return found

    def _parameter(self, shape: tuple[int, ...], *, split: int, stride: int) -> torch.nn.Parameter:
        """Allocate a parameter with the attributes of Megatron's experts; ``split`` is the dimension
        that tensor parallelism splits, in ``stride`` parts one by one.
        """
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(tensor=parameter, is_parallel=True, dim=split, stride=stride)
        # False: Megatron sums gradients and splits optimizer states over the data-parallel ranks of experts.
        parameter.allreduce = (  # type: ignore[attr-defined]
            config.expert_model_parallel_size == 1
            and config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        )
        return parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlaces:
    """The places of one matrix of each expert of this rank in a checkpoint."""

    key: str
    """The name in the checkpoint, with a dot at its end."""
    is_pair: bool
    """Whether the matrix is a gate and an up projection, which are split over ranks one by one."""
    layer: tuple[Any, ...]
    """The place of the layer in a checkpoint that stacks layers; Megatron's offsets."""
    first: int
    """The number of this rank's first expert."""
    total: int
    """The number of experts on all ranks."""
    tensor_rank: int
    tensor_size: int
    data_rank: int

    def factory(self, parameter: Tensor) -> ShardedTensorFactory:
        """Describe the stacked ``parameter``."""
        return ShardedTensorFactory(
            key=f"{self.key}weight",
            data=parameter,
            build_fn=self._built,
            merge_fn=_stacked,
            replica_id=(0, 0, self.data_rank),
        )

    def split(self, stacked: ShardedTensorFactory) -> list[ShardedTensorFactory]:
        """Describe each expert's matrix, from the description of the stacked parameter."""
        return [
            ShardedTensorFactory(
                key=stacked.key,
                data=matrix,
                build_fn=partial(self._built_one, number),
                merge_fn=self._joined,
                replica_id=stacked.replica_id,
            )
            for number, matrix in enumerate(stacked.data)
        ]

    def extra_state(self, number: int) -> ShardedObject:
        """Describe the empty state that Megatron's linear layers have in addition to their weights."""
        replica = (0, self.tensor_rank, self.data_rank)
        return make_sharded_object_for_checkpoint(None, f"{self.key}_extra_state", self._offsets(number), replica)

    @torch.no_grad()
    def _built(self, key: str, stacked: Tensor, replica_id: Any, flattened: slice | None) -> list[list[ShardedTensor]]:
        return [self._built_one(number, key, each, replica_id, flattened) for number, each in enumerate(stacked)]

    def _built_one(
        self, number: int, key: str, matrix: Tensor, replica_id: Any, flattened: slice | None
    ) -> list[ShardedTensor]:
        assert flattened is None, "Megatron no longer saves flattened parts"
        offsets = self._offsets(number)
        axis, size = len(offsets) + (0 if self.is_pair else 1), self.tensor_size
        parts = matrix.chunk(2) if self.is_pair else (matrix,)
        return [
            ShardedTensor.from_rank_offsets(
                key,
                part,
                *offsets,
                (axis, self.tensor_rank + half * size, len(parts) * size),
                replica_id=replica_id,
                prepend_axis_num=len(offsets),
            )
            for half, part in enumerate(parts)
        ]

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return _one(parts)

    def _offsets(self, number: int) -> tuple[Any, ...]:
        return (*self.layer, (len(self.layer), self.first + number, self.total))


def expert_places(each: Any) -> ExpertPlaces | None:
    """Return the places that a description in a sharded state dict was made from; None for any other description."""
    places = getattr(getattr(each, "build_fn", None), "__self__", None)
    return places if isinstance(places, ExpertPlaces) else None


def expert_names(name: str, num_experts: int) -> list[str]:
    """Return the name of each expert's matrix for the name of a stacked parameter."""
    prefix, _, parameter = name.rpartition(".")
    return [f"{prefix}.{_name(number, _MATRICES[parameter])}" for number in range(num_experts)]


def _without_extra_state(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Ignore the empty extra state, which ``sharded_state_dict`` describes and checkpoints have."""
    for name in [name for name in state if name.startswith(prefix) and name.endswith("._extra_state")]:
        del state[name]


@torch.no_grad()
def _stacked(experts: Sequence[Sequence[Tensor]]) -> Tensor:
    """Stack the loaded matrices; no copy if they were loaded into one tensor."""
    parts = [part for expert in experts for part in expert]
    first, size = parts[0], sum(part.numel() for part in parts)
    start = first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or part.storage_offset() != start:
            return torch.stack([_one(expert) for expert in experts])
        if not part.is_contiguous():
            return torch.stack([_one(expert) for expert in experts])
        start += part.numel()
    size //= len(experts)
    whole: Tensor = first.as_strided((len(experts), size // first.shape[1], first.shape[1]), (size, first.shape[1], 1))
    return whole


def _one(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _name(number: int, matrix: str) -> str:
    return f"local_experts.{number}.{matrix}.weight"


def _part(parameter: Any, number: int) -> Tensor:
    part: Any = parameter.detach()[number].requires_grad_(parameter.requires_grad)
    main = getattr(parameter, "main_param", None)
    if getattr(parameter, "main_grad", None) is not None:
        part.main_grad = parameter.main_grad[number]
    if main is not None and main.numel() == parameter.numel():  # the distributed optimizer may have a part of it
        part.main_param = main.view(parameter.shape)[number]
    found: Tensor = part
    return found
