"""The path check: a collective of the trainer's rank 0 and the ranks of one engine, which shows that data passes.

    driver    asks both sides to join a separate group, whose name begins with ``PATH_CHECK``
    trainer   joins, meets, waits until all ranks of the engine have met, leaves
    engine    joins, meets, answers ``MET``; leaves with its next update (``plugin/direct``)

An engine whose path for collectives is cut, or loses large packets, may still answer HTTP, and even join the group.
Importing this module imports no torch, because the driver uses its names.
"""

import importlib
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
KNOCK_EVERY_S = 0.1
"""Seconds between two attempts to reach a store."""
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


def wait_until_served(address: str, port: int, within_s: float, refused_s: float) -> None:
    """Return once a group's store is served at the address.

    Raises TimeoutError, with the last failure's words: after ``refused_s`` if the port is closed, else after
    ``within_s``.
    """
    began = time.monotonic()
    while (failure := _knocked(address, port, within_s)) is not None:
        limit_s = refused_s if isinstance(failure, ConnectionRefusedError) else within_s
        if time.monotonic() > began + limit_s:
            raise TimeoutError(f"the trainer serves no store for the group at {address}:{port}: {failure}")
        time.sleep(KNOCK_EVERY_S)


def _knocked(address: str, port: int, within_s: float) -> OSError | None:
    """Connect once; return the failure."""
    try:
        socket.create_connection((address, port), timeout=within_s).close()
    except OSError as error:
        return error
    return None


@contextmanager
def connecting_within(seconds: float) -> Iterator[None]:
    """Limit the time for connecting to a store that torch's rendezvous makes within this context.

    Waits in the store keep the limit that the caller sets once there is a connection.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name
    theirs = rendezvous.TCPStore

    # Invariant: ``_create_c10d_store`` looks the name up in this module at each call, and passes keywords only.
    def limited(**asked: Any) -> Any:
        return theirs(**{**asked, "timeout": min(asked["timeout"], timedelta(seconds=seconds))})

    rendezvous.TCPStore = limited
    try:
        yield
    finally:
        rendezvous.TCPStore = theirs


def meet(group: Any, device: Any, within_s: float) -> None:
    """Sum a tensor over all members of the group, which must do the same, and tell them that this one is done.

    Raises TimeoutError or RuntimeError.  The collective is then still in flight, until the group is aborted.
    """
    import torch
    import torch.distributed as dist

    from asyncrl.engines.weight_sync.group_abort import store_of, wait_on_stream

    store = store_of(group)
    store.set(f"{_CAME}-{group.rank()}", "")
    # Nothing ends the forming of an NCCL communicator, so all members must be there.
    store.wait([f"{_CAME}-{rank}" for rank in range(group.size())], timedelta(seconds=within_s))
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


def wait_until_all_met(group: Any, within_s: float) -> None:
    """Return once all other members have met, so that the group can be left.  Raises RuntimeError."""
    from asyncrl.engines.weight_sync.group_abort import store_of

    keys = [f"{_MET}-{rank}" for rank in range(1, group.size())]
    store_of(group).wait(keys, timedelta(seconds=within_s))
