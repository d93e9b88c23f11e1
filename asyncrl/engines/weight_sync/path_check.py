"""The path check: a collective of the trainer's rank 0 and the ranks of one engine, which shows that data passes.

    driver    asks both sides to join a separate group, whose name begins with ``PATH_CHECK``
    trainer   joins, meets, waits until all ranks of the engine have met, leaves
    engine    joins, meets, answers ``MET``; leaves with its next update (``plugin/direct``)

An engine whose path for collectives is cut, or loses large packets, may still answer HTTP, and even join the group.
Importing this module imports no torch, because the driver uses its names.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

PATH_CHECK = "asyncrl-path-check-"
"""Beginning of the names of groups that meet at once, as part of joining."""
MET = "asyncrl: met"
"""The plug-in's answer once an engine has met the trainer."""
PATH_S = 20.0
"""Deadline in seconds of a path check.  A group of one engine is formed in 1 to 5 s, including NCCL's communicator."""
NUM_BYTES = 1 << 20
"""Bytes that each member sends: many full packets, because a path may lose only those."""
LOOK_EVERY_S = 0.001
"""Seconds between two checks for completion."""
_CAME, _MET = "asyncrl-came", "asyncrl-met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The separate group of one path check: the trainer's rank 0, and the ranks of one engine from rank 1 on."""

    master_address: str
    master_port: int
    world_size: int
    group_name: str
    """Begins with ``PATH_CHECK``."""
    backend: str


def meet(group: Any, device: Any, within_s: float) -> None:
    """Sum a tensor over all members of the group, which must do the same, and tell them that this one is done.

    Raises TimeoutError or RuntimeError.  The collective is then still in flight, until the group is aborted.
    """
    import torch
    import torch.distributed as dist

    from asyncrl.engines.weight_sync.group_abort import store_of, wait_on_stream

    store = store_of(group)
    _wait_until_all_came(store, group.rank(), group.size(), within_s)
    flat = torch.ones(NUM_BYTES // 4, device=device)
    # Invariant: before ``is_done`` the host waits for no GPU work, which would never end behind a collective that a
    # member does not enter.
    work = dist.all_reduce(flat, group=group, async_op=True)
    is_done = work.is_completed
    if flat.device.type != "cpu":
        wait_on_stream(work, flat.device)
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        is_done = done.query
    deadline = time.monotonic() + within_s
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no collective within {within_s:g} s")
        time.sleep(LOOK_EVERY_S)
    if flat.device.type == "cpu":
        work.wait()  # raises the error of a collective that has failed
    if not bool((flat == group.size()).all()):
        raise RuntimeError("the collective was aborted")
    store.set(f"{_MET}-{group.rank()}", "")


def _wait_until_all_came(store: Any, rank: int, size: int, within_s: float) -> None:
    """Return once all members are there: nothing ends the forming of an NCCL communicator without one of them."""
    store.set(f"{_CAME}-{rank}", "")
    store.wait([f"{_CAME}-{each}" for each in range(size)], timedelta(seconds=within_s))


def wait_until_all_met(group: Any, within_s: float) -> None:
    """Return once all other members have met, so that the group can be left.  Raises RuntimeError."""
    from asyncrl.engines.weight_sync.group_abort import store_of

    keys = [f"{_MET}-{rank}" for rank in range(1, group.size())]
    store_of(group).wait(keys, timedelta(seconds=within_s))
