"""The engine's side of a broadcast: waits with a deadline, and ends when the trainer has given up the update.

Invariant: while a broadcast is in flight, only ``finish`` lets the host wait for GPU work that comes after it.  That
rules out ``item`` on data behind ``wait``, and ``torch.cuda.synchronize`` or a kernel's first launch anywhere.  If the
trainer has died the broadcast never ends, and only ``finish`` has a deadline.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

ARRIVAL_S = 60.0
"""Deadline in seconds for data that the trainer has ready; 100 GB take a second.

After that the group is aborted, so that this server can answer and join another group.
"""
LOOK_EVERY_S = 0.0002
"""Seconds between two checks for completion; an update takes several milliseconds at least."""
ASK_EVERY_S = 0.25
"""Seconds between two queries, over the network, whether the trainer has given up the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """The group on which a bucket arrives, and all groups of the update."""

    group: Any
    main: Any
    """The main group, whose store says whether the trainer has given up the update."""
    others: tuple[Any, ...] = ()
    """All groups but the main one."""

    def abort(self) -> None:
        """Abort all groups: broadcasts in flight end, and none of the groups can be used any more."""
        from asyncrl.engines.weight_sync.group_abort import abort_together

        abort_together((self.main, *self.others))


def broadcast(flat: Any, channel: Channel) -> Any:
    """Begin to receive the trainer's next broadcast into ``flat``; return its handle.

    Invariant: on a GPU NCCL's stream first waits for all that this thread has launched on its current stream.  Earlier
    reads of ``flat`` are therefore safe there; reads launched on another stream would see half-overwritten bytes.
    """
    import torch.distributed as dist

    return dist.broadcast(flat, src=0, group=channel.group, async_op=True)


def wait(coming: Any, flat: Any, channel: Channel) -> None:
    """Order all later work of this thread on ``flat`` after the broadcast ``coming``.

    On a GPU this returns at once: only the current stream waits.  On a CPU it returns once the data has arrived, and
    raises TimeoutError or ConnectionError.
    """
    from asyncrl.engines.weight_sync.group_abort import wait_on_stream

    # Invariant: on a GPU the host may read ``flat`` only after ``finish``, and another stream only after an event that
    # was recorded here.  Earlier they would read the previous bucket.
    if flat.device.type == "cpu":
        _until(coming.is_completed, channel)
    wait_on_stream(coming, flat.device)


def finish(flat: Any, channel: Channel) -> None:
    """Return once all broadcasts and copies on this thread's stream are done.  Raises TimeoutError or ConnectionError.

    On a CPU nothing is left to do.
    """
    if flat.device.type == "cpu":
        return
    import torch

    # An event that is polled, because ``synchronize`` has no deadline: the broadcast of a dead trainer never ends.  The
    # event covers only the current stream: the broadcasts that it waits for, and the copies launched on it.
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    _until(done.query, channel)


def check_arrival(flat: Any, channel: Channel, name: str) -> None:
    """Receive the trainer's checksum, which follows each bucket, and compare.  Raises ValueError if it differs."""
    import torch

    from asyncrl.engines.weight_sync.flat import checksum

    told = torch.empty((), dtype=torch.int64, device=flat.device)
    wait(broadcast(told, channel), told, channel)
    finish(told, channel)
    if (found := checksum(flat).item()) != told.item():
        raise ValueError(f"the bucket of {name} has checksum {found}, the trainer's {told.item()}")


def _until(is_done: Callable[[], bool], channel: Channel) -> None:
    """Poll ``is_done``.

    Raises TimeoutError after ``ARRIVAL_S``, or ConnectionError once the trainer has given up the update.  Either way
    all groups of the update are aborted first.
    """
    began = time.monotonic()
    asking = None
    try:
        while not is_done():
            waited_s = time.monotonic() - began
            if asking is None and waited_s > ASK_EVERY_S:
                asking = _Asking(channel.main)
            if asking is not None and asking.is_abandoned:
                channel.abort()
                raise ConnectionError("the trainer has given this update up")
            if waited_s > ARRIVAL_S:
                channel.abort()
                raise TimeoutError(f"nothing came for {ARRIVAL_S:g} s")
            time.sleep(LOOK_EVERY_S)
    finally:
        if asking is not None:
            asking.is_over.set()


class _Asking:
    """A thread that queries whether the trainer has given up an update.

    A separate thread, because a query to a host that is down may take long.
    """

    def __init__(self, main: Any) -> None:
        # Invariant: the asking thread sets ``is_abandoned``, the waiting one ``is_over``, each once: no lock is needed.
        # Only the waiting thread aborts groups.  The asking thread only reads the store, and may outlive the wait by
        # one query; ``is_abandoned`` turns the errors of a group that is gone into True.
        self.is_over = Event()
        self.is_abandoned = False
        self._main = main
        Thread(target=self._run, name="asyncrl-abandoned", daemon=True).start()

    def _run(self) -> None:
        from asyncrl.engines.weight_sync.group_abort import is_abandoned

        while not self.is_abandoned and not self.is_over.wait(ASK_EVERY_S):
            self.is_abandoned = is_abandoned(self._main)
