"""The process group through which weights reach the engines: rank 0 is ours, the others are SGLang's.

SGLang's own ``sglang.srt.utils.common.init_custom_process_group`` and ``FlattenedTensorBucket`` do the same, but cost
4 to 9 s and 1,700 modules to import.  ``tests/engines/megatron/weights/test_update_group.py`` compares the two.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from asyncrl.engines.weight_sync.group_abort import without_watchdog
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="torch.distributed.distributed_c10d._new_process_group_helper",
        parameters=("group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"),
        keywords=("timeout",),
        used_in=__name__,
    ),
    Internal(name="torch.distributed.distributed_c10d._world", attributes=("pg_group_ranks",), used_in=__name__),
    Internal(name="torch.distributed.distributed_c10d.Backend", used_in=__name__),
    Internal(name="torch.distributed.distributed_c10d.GroupName", used_in=__name__),
    Internal(name="torch.distributed.distributed_c10d.PrefixStore", used_in=__name__),
    Internal(
        name="torch.distributed.rendezvous.rendezvous", parameters=("url", "rank", "world_size"), used_in=__name__
    ),
)
"""Names that may change with the library: see docs/internals.md."""

JOIN_S = 60.0
"""For all members to come: they are asked at the same time, and an engine comes between two forward passes.  One that
has died meanwhile holds up the trainer for so long."""


def join_update_group(
    master_address: str, master_port: int, world_size: int, group_name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Wait until all have joined, for ``JOIN_S`` at most, and return the group.

    ``timeout_s`` is for its collectives with gloo; with NCCL those who wait have deadlines (``outbox``, ``arrival``).
    torch's public ``new_group`` only makes subgroups of the default group, to which the engines do not belong; the two
    private names below are those that SGLang uses on its side.
    """
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, world_size = next(rendezvous(address, 0, world_size, timeout=min(timeout, timedelta(seconds=JOIN_S))))
    store.set_timeout(timeout)
    group: dist.ProcessGroup
    with without_watchdog():
        group, _ = distributed_c10d._new_process_group_helper(  # noqa: SLF001
            world_size,
            rank,
            [],
            distributed_c10d.Backend(backend),
            distributed_c10d.PrefixStore(group_name, store),
            group_name=distributed_c10d.GroupName(group_name),
            timeout=timeout,
        )
    # The public collectives look up here which member ``src=0`` is.  The helper leaves it to its caller.
    distributed_c10d._world.pg_group_ranks[group] = {  # noqa: SLF001
        member: member for member in range(world_size)
    }
    return group


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """The bytes of all tensors, one behind the other: what ``load_format="flattened_bucket"`` receives."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])
