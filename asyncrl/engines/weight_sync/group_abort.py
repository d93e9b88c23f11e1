"""Groups that survive the death of a member, and the signal by which the trainer gives them up.

A process that waits in a broadcast on a GPU does not notice that another member has died.  The trainer, which serves
the group's store, sets a key there to tell all members.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread
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
ABORT_S = 30.0
"""Seconds for the aborts of all groups of an update; each takes milliseconds."""
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable that torch reads when it makes a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroups:
    """The process groups of one update group: they are made, abandoned and left together."""

    main: dist.ProcessGroup
    """The group of the trainer's rank 0 and all engine ranks.  Its store tells members of all groups to give up."""
    parts: tuple[dist.ProcessGroup, ...] = ()
    """For each expert part, the group of the trainer's rank 0 and the ranks of that part (``part_groups``)."""

    @property
    def every(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups, the main one first."""
        return self.main, *self.parts


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Make groups inside this context without torch's watchdog threads.

    Where NCCL uses a network, such a thread notices a member's death and ends its own process a minute later; leaving
    the group takes that minute, too.  Use it from one thread at a time: groups that other threads make meanwhile have
    no watchdog either.
    """
    # Invariant: one thread at a time makes groups.  The variable belongs to the process, and torch reads it natively.
    before = os.environ.get(_BLOCKING_WAIT, "0")
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        # Set, not deleted: deleting moves the entries behind it, which native threads may be reading.
        os.environ[_BLOCKING_WAIT] = before


def wait_on_stream(work: dist.Work, device: torch.device) -> None:
    """Order all later GPU work of this thread's current stream after ``work``; on a CPU, return once it is done.

    In a group without a watchdog ``work.wait()`` would block the thread on a GPU, too.
    """
    if device.type == "cpu":
        work.wait()
    else:
        work.block_current_stream()


def abandon(groups: UpdateGroups) -> None:
    """Give up the groups: neither the engines nor any thread of this process waits in one of them any longer.

    They are of no use after this.
    """
    # Invariant: the key is set first, because engines poll it, and the abort may fail.  Any thread may call this; a
    # thread that waits in a collective gets a RuntimeError there.
    with suppress(RuntimeError, KeyError):  # the store is gone, and with it the way to tell the engines
        store_of(groups.main).set(_KEY, "")
    abort_together(groups.every)


def abort_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort all groups at the same time: broadcasts in flight end, and none of the groups can be used any more.

    Waits for at most ``ABORT_S`` seconds.
    """
    # Invariant: no abort waits for another one to return.  NCCL's abort may wait for the whole device, which a
    # broadcast of another group holds until that group is aborted, too.
    aborting = [Thread(target=_abort, args=(group,), name="asyncrl-abort", daemon=True) for group in groups]
    for thread in aborting:
        thread.start()
    deadline = time.monotonic() + ABORT_S
    for thread in aborting:
        thread.join(max(0.0, deadline - time.monotonic()))


def _abort(group: dist.ProcessGroup) -> None:
    with suppress(RuntimeError):  # aborting a group with a dead member may fail
        group.abort()


def is_abandoned(main: dist.ProcessGroup) -> bool:
    """Return whether the trainer has given up the groups of ``main``, or is gone and its store with it."""
    try:
        return bool(store_of(main).check([_KEY]))
    except (RuntimeError, KeyError):
        return True


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the group's store, for which torch has no public function."""
    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001
