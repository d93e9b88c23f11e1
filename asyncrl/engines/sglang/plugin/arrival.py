"""Broadcasts as an engine gets them: each waits with a deadline, and hears when the trainer has given the update up."""

import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

ARRIVAL_S = 60.0
"""For an update to arrive, from a trainer that has it ready: 100 GB take a second.  Then the group is given up, so that
this server can answer, and join another."""
LOOK_EVERY_S = 0.0002
"""Whether what was asked for is done; an update takes some milliseconds at least."""
ASK_EVERY_S = 0.25
"""Whether the trainer has given the update up, because another engine died: it is asked over the network."""


def broadcast(flat: Any, group: Any) -> Any:
    """Ask for what the trainer sends into ``flat``."""
    import torch.distributed as dist

    return dist.broadcast(flat, src=0, group=group, async_op=True)


def wait(coming: Any, flat: Any, group: Any) -> None:
    """What is done with ``flat`` from now on sees what came; on a GPU, this process goes on at once."""
    from asyncrl.engines.weight_sync.group_abort import wait_on_stream

    if flat.device.type == "cpu":
        _until(coming.is_completed, group)
    wait_on_stream(coming, flat.device)


def finish(flat: Any, group: Any) -> None:
    """Return when everything has come and was copied.  Raises TimeoutError and ConnectionError."""
    if flat.device.type == "cpu":
        return
    import torch

    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    _until(done.query, group)


def check_arrival(flat: Any, group: Any, name: str) -> None:
    """The trainer sends its checksum behind each bucket; raise ValueError when it is another one."""
    import torch

    from asyncrl.engines.weight_sync.flat import checksum

    told = torch.empty((), dtype=torch.int64, device=flat.device)
    wait(broadcast(told, group), told, group)
    finish(told, group)
    if (found := checksum(flat).item()) != told.item():
        raise ValueError(f"the bucket of {name} has checksum {found}, the trainer's {told.item()}")


def _until(is_done: Callable[[], bool], group: Any) -> None:
    """Raises TimeoutError, or ConnectionError once the trainer has given the update up; the group is left then."""
    began = time.monotonic()
    asking = None
    try:
        while not is_done():
            waited_s = time.monotonic() - began
            if asking is None and waited_s > ASK_EVERY_S:
                asking = _Asking(group)
            if asking is not None and asking.is_abandoned:
                group.abort()
                raise ConnectionError("the trainer has given this update up")
            if waited_s > ARRIVAL_S:
                group.abort()
                raise TimeoutError(f"nothing came for {ARRIVAL_S:g} s")
            time.sleep(LOOK_EVERY_S)
    finally:
        if asking is not None:
            asking.is_over.set()


class _Asking:
    """A thread that asks whether the trainer has given an update up: a host that is gone may not answer for long."""

    def __init__(self, group: Any) -> None:
        # Invariant: the asking thread sets ``is_abandoned``, the waiting one ``is_over``, each once: no lock is needed.
        # Only the waiting thread aborts the group.
        self.is_over = Event()
        self.is_abandoned = False
        self._group = group
        Thread(target=self._run, name="asyncrl-abandoned", daemon=True).start()

    def _run(self) -> None:
        from asyncrl.engines.weight_sync.group_abort import is_abandoned

        while not self.is_abandoned and not self.is_over.wait(ASK_EVERY_S):
            self.is_abandoned = is_abandoned(self._group)
