"""Process groups between the trainer's rank 0 and the engine ranks of one expert part.  Both sides use this module.

              main group      part 0        part 1
    trainer       0              0             0
    engine a     1, 2            1 (rank 1)    1 (rank 2)
    engine b     3, 4            2 (rank 3)    2 (rank 4)

The groups share the main group's store, each below a prefix.  torch's public ``new_group`` only makes subgroups of the
default group, which trainer and engines do not share.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncrl.engines.weight_sync.group_abort import store_of, without_watchdog
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
)
"""Names that may change with the library: see docs/internals.md."""

JOIN_S = 60.0
"""The deadline for all members to join, in seconds, as for the main group (``update_group.JOIN_S``)."""


def make_group(
    store: distributed_c10d.Store, rank: int, world_size: int, *, name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Make a group without torch's watchdog, as this process's ``rank`` in it.

    ``timeout_s`` limits the group's collectives with gloo; with NCCL the waiting sides have deadlines.
    """
    group: dist.ProcessGroup
    with without_watchdog():
        group, _ = distributed_c10d._new_process_group_helper(  # noqa: SLF001
            world_size,
            rank,
            [],
            distributed_c10d.Backend(backend),
            distributed_c10d.PrefixStore(name, store),
            group_name=distributed_c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
        )
    # The public collectives look up the member ``src=0`` here.  The helper above leaves the entry to its caller.
    distributed_c10d._world.pg_group_ranks[group] = {  # noqa: SLF001
        member: member for member in range(world_size)
    }
    return group


def join_as_trainer(
    main: dist.ProcessGroup, num_parts: int, world_size: int, *, name: str, backend: str, timeout_s: float
) -> tuple[dist.ProcessGroup, ...]:
    """Join the groups of all expert parts, of ``world_size`` members each, as their rank 0.

    Waits for the engines' ranks for at most ``JOIN_S``.  Raises RuntimeError after that time.
    """
    # Invariant: all engine ranks are there before a group is made.  Making a gloo group waits for its members, too, but
    # for ``timeout_s``, which may be half an hour.
    store = store_of(main)
    members = [(part, rank) for part in range(num_parts) for rank in range(1, world_size)]
    store.wait([_joined(name, part, rank) for part, rank in members], timedelta(seconds=JOIN_S))
    return tuple(
        make_group(store, 0, world_size, name=_name(name, part), backend=backend, timeout_s=timeout_s)
        for part in range(num_parts)
    )


def join_as_engine(
    main: dist.ProcessGroup, part: int, rank: int, world_size: int, *, name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join the group of one expert part as ``rank`` of ``world_size``; the counterpart of ``join_as_trainer``."""
    store = store_of(main)
    store.set(_joined(name, part, rank), "")
    store.wait([_joined(name, part, each) for each in range(1, world_size)], timedelta(seconds=JOIN_S))
    return make_group(store, rank, world_size, name=_name(name, part), backend=backend, timeout_s=timeout_s)


def _joined(name: str, part: int, rank: int) -> str:
    """Return the key that the member ``rank`` of a part sets in the main group's store."""
    return f"{_name(name, part)}/joined-{rank}"


def _name(name: str, part: int) -> str:
    return f"{name}/part-{part}"
