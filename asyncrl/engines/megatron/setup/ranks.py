"""Object collectives between trainer ranks.  Every rank must call these functions, in the same order."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def of_every_rank[T](mine: T) -> list[T]:
    """Gather each rank's value, in rank order, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def from_last_stage[T](found: T) -> T:
    """Broadcast the value of the last pipeline stage to all stages of this pipeline."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return found
    box = [found]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0]


def on_first_rank[T](mine: T) -> list[T]:
    """Gather the values of rank 0's data-parallel group on rank 0, by data-parallel rank; empty on other ranks.

    The ranks of this group train on different samples.  Each other rank shares a copy of the model with one of them
    and has the same value, so it sends nothing.
    """
    group: Any = parallel_state.get_data_parallel_group_gloo()
    if 0 not in dist.get_process_group_ranks(group):
        return []
    found: list[Any] | None = [None] * group.size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, found, dst=0, group=group)
    return found or []
