"""The state of a distributed optimizer as whole tensors in host memory, which a checkpoint for any layout needs.

The ranks send their shards in pieces, from GPU to GPU, to the rank that writes them, and only that rank copies them to
its host memory.  Megatron's own method copies the whole state six times, on every data-parallel rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.errors import first_line
from asyncrl.internals import Internal

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"

INTERNALS = (
    Internal(
        name=f"{_OPTIMIZER}.sharded_param_state_fully_reshardable",
        parameters=("self", "model_sharded_state_dict", "is_loading", "metadata"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=f"{_OPTIMIZER}._get_main_param_and_optimizer_states",
        parameters=("self", "model_param"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=_OPTIMIZER,
        attributes=("gbuf_ranges", "buffers", "data_parallel_group", "optimizer_state_keys"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucket",
        attributes=("param_to_index", "grad_data"),
        used_in=__name__,
    ),
    Internal(name="megatron.core.dist_checkpointing.mapping.apply_factories", used_in=__name__),
    Internal(name="megatron.core.dist_checkpointing.mapping.is_main_replica", used_in=__name__),
    Internal(name="megatron.core.dist_checkpointing.dict_utils.nested_values", used_in=__name__),
    Internal(
        name="megatron.core.dist_checkpointing.utils.extract_sharded_tensors_and_factories",
        parameters=("sharded_state_dict",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

PIECE = 2**26
"""The maximum number of values of all ranks that are sent at once: 256 MB on the GPU of the rank that writes."""


class Gathering:
    """The gathering of one distributed optimizer's state.  Collective over the optimizer's data-parallel group."""

    def __init__(self, part: Any, name: object, host: CheckpointMemory) -> None:
        """Gather into ``host``, on the first rank of the group.  ``part`` is the member ``name`` of a chain."""
        self._part = part
        self._name = name
        self._host = host
        self._group = part.data_parallel_group
        self._num_ranks: int = self._group.size()
        self._writes = self._group.rank() == 0
        self._keys: tuple[str, ...] = ("param", *part.optimizer_state_keys)

    def state(self, model_state: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Do what ``sharded_param_state_fully_reshardable`` does in a save: the sharded tensors of each parameter.

        On ranks that write none of it, the tensors are memory that was never touched.
        """
        described, _ = extract_sharded_tensors_and_factories(model_state)
        of_parameter = {each.data: each for each in nested_values(described)}
        gathered = dict[int, dict[str, Any]]()
        for place, ranges in enumerate(self._part.gbuf_ranges):
            (of_buckets,) = ranges.values()
            buffer = self._part.buffers[place]
            whole = {
                parameter: self._whole(of_parameter[parameter], len(gathered) + number)
                for number, parameter in enumerate(buffer.param_index_map)
            }
            for bucket, of_bucket in zip(buffer.buckets, of_buckets, strict=True):
                self._gather(bucket, of_bucket["param_map"], whole)
            for parameter, tensors in whole.items():
                gathered[len(gathered)] = {
                    key: _described(of_parameter[parameter], key, tensor) for key, tensor in tensors.items()
                }
        return gathered

    def _whole(self, described: Any, number: int) -> dict[str, torch.Tensor]:
        """Memory for all values of a parameter, in its shape, for each key.

        Tensors without memory if there is none: the other ranks gather, and wait for this one.
        """
        shape = described.data.shape
        if self._writes:
            try:
                return {key: self._host.tensor((self._name, number, key), shape, torch.float32) for key in self._keys}
            except (MemoryError, RuntimeError) as error:
                self._host.failure = f"no copy in host memory: {first_line(error)}"
                return {key: torch.empty(shape, dtype=torch.float32, device="meta") for key in self._keys}
        if is_main_replica(described.replica_id):
            raise AssertionError(f"another rank than the first of its group writes {described.key}")
        return {key: torch.empty(shape, dtype=torch.float32) for key in self._keys}

    def _gather(self, bucket: Any, own: dict[Any, Any], whole: dict[Any, dict[str, torch.Tensor]]) -> None:
        """Copy all shards of a bucket into the tensors ``whole``.  ``own`` are the ranges of this rank's shard."""
        length = bucket.grad_data.numel() // self._num_ranks
        step = max(1, PIECE // self._num_ranks)
        states = {parameter: self._part._get_main_param_and_optimizer_states(parameter) for parameter in own}  # noqa: SLF001
        for key in self._keys:
            mine = _Runs((own[each]["gbuf_local"].start, state[key].detach()) for each, state in states.items())
            theirs = _Runs((place[0], whole[each][key].view(-1)) for each, place in bucket.param_to_index.items())
            for start in range(0, length, step):
                piece = torch.zeros(min(step, length - start), dtype=torch.float32, device=bucket.grad_data.device)
                for here, values in mine.common(start, piece):
                    here.copy_(values, non_blocking=True)
                for rank, received in self._received(piece):
                    for here, values in theirs.common(rank * length + start, received):
                        values.copy_(here, non_blocking=True)

    def _received(self, piece: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Send ``piece``, and yield the piece of every rank on the rank that writes."""
        if self._num_ranks == 1:
            yield 0, piece
            return
        pieces = [torch.empty_like(piece) for _ in range(self._num_ranks)] if self._writes else None
        dist.gather(piece, pieces, group=self._group, group_dst=0)
        yield from enumerate(pieces or ())


class _Runs:
    """Runs of consecutive values that begin at places of a longer sequence, and do not overlap."""

    def __init__(self, runs: Iterable[tuple[int, torch.Tensor]]) -> None:
        self._runs = sorted((run for run in runs if len(run[1])), key=itemgetter(0))
        self._starts = [start for start, _ in self._runs]

    def common(self, start: int, piece: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what ``piece``, which begins at ``start``, and each run have in common: views of both."""
        # A search, because each of thousands of pieces has a part of few among thousands of runs.
        first = max(0, bisect_right(self._starts, start) - 1)
        for begin, values in self._runs[first : bisect_left(self._starts, start + len(piece))]:
            low, high = max(begin, start), min(begin + len(values), start + len(piece))
            if low < high:
                yield piece[low - start : high - start], values[low - begin : high - begin]


def _described(of_parameter: Any, key: str, tensor: torch.Tensor) -> Any:
    """Describe ``tensor`` like the parameter that it belongs to."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{key}.{of_parameter.key}", "data": tensor}
    if not isinstance(of_parameter, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(of_parameter, **changes)


def with_separate_storages(state: dict[str, Any], host: CheckpointMemory) -> None:
    """Split combined tensors in ``state``, and give each part that lies in ``host`` a storage of just its size.

    Megatron would copy the parts, because their storages are larger than they are.
    """
    apply_factories(state)
    for each in nested_values(state):
        if isinstance(each, ShardedTensor) and host.has(each.data) and each.data.is_contiguous():
            each.data = torch.from_numpy(each.data.numpy())
