"""What ranks tell each other besides tensors.  Every rank must call these, in the same order."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state


def of_every_rank[T](mine: T) -> list[T]:
    """On every rank, what each has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def from_last_stage[T](found: T) -> T:
    """What the last stage of this pipeline found."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return found
    box = [found]
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0]


def on_first_rank[T](mine: T) -> list[T]:
    """On rank 0, what it and the ranks with other samples have, by their data-parallel rank; nothing elsewhere.

    The ranks that these share the model with have the same, and are not asked.
    """
    group: Any = parallel_state.get_data_parallel_group_gloo()
    if 0 not in dist.get_process_group_ranks(group):
        return []
    found: list[Any] | None = [None] * group.size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, found, dst=0, group=group)
    return found or []
