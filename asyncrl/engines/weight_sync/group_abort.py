"""Groups that outlive the death of a member, until the trainer gives them up, and how it tells engines that it has.

Who waits in a broadcast on a GPU does not see that another member has died.  The trainer serves the group's store, and
says it there.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncrl.internals import Internal

INTERNALS = (
    Internal(name="torch.distributed.distributed_c10d._get_process_group_store", parameters=("pg",), used_in=__name__),
    Internal(name="torch.distributed.ProcessGroup", attributes=("abort", "group_name"), used_in=__name__),
    Internal(name="torch.distributed.Work", attributes=("block_current_stream",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

_KEY = "asyncrl-abandoned"
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that torch reads as it makes a group."""


@contextmanager
def without_watchdog() -> Iterator[None]:
    """A group that is made within gets none of torch's watchdog threads.

    One of those hears of a member's death where NCCL goes over a network, and ends its own process a minute later;
    leaving the group takes that minute.  For one thread at a time; groups that others make meanwhile have none either.
    """
    # Invariant: one thread at a time makes groups.  The variable belongs to the process, and torch reads it natively.
    before = os.environ.get(_BLOCKING_WAIT, "0")
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        os.environ[_BLOCKING_WAIT] = before  # not deleted: native threads may be reading what lies behind it


def wait_on_stream(work: dist.Work, device: torch.device) -> None:
    """What this thread has its GPU do from now on comes behind ``work``; on a CPU, return when it is over.

    In a group without a watchdog ``work.wait()`` would hold up the thread on a GPU, too.
    """
    if device.type == "cpu":
        work.wait()
    else:
        work.block_current_stream()


def abandon(group: dist.ProcessGroup) -> None:
    """Nobody shall wait any more, neither the engines nor any thread here: the group is of no use after this."""
    # The key comes first: engines ask for it, and the abort may fail.  Any thread may call this; the one that waits in
    # a collective gets a RuntimeError there.
    with suppress(RuntimeError, KeyError):  # nobody can be told
        _store(group).set(_KEY, "")
    with suppress(RuntimeError):  # of a group whose member died
        group.abort()


def is_abandoned(group: dist.ProcessGroup) -> bool:
    """Also when the trainer is gone, and its store with it."""
    try:
        return bool(_store(group).check([_KEY]))
    except (RuntimeError, KeyError):
        return True


def _store(group: dist.ProcessGroup) -> Any:
    """Where its members met; torch has no public way to it."""
    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001
