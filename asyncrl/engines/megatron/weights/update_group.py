"""The process group through which weights reach the engines: rank 0 is ours, the others are SGLang's.

SGLang's ``sglang.srt.utils.common.init_custom_process_group`` and ``FlattenedTensorBucket`` do the same, but importing
them takes 4 to 9 s and 1,700 modules.  ``tests/engines/megatron/weights/test_update_group.py`` compares the two.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock, Timer
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from asyncrl.engines.weight_sync.part_groups import make_group
from asyncrl.internals import Internal

rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of this name

INTERNALS = (Internal(name="torch.distributed.rendezvous.TCPStore", used_in=__name__),)
"""Names that may change with the library: see docs/internals.md."""

JOIN_S = 60.0
"""The deadline for all members to join, in seconds.  They are asked at the same time, and an engine joins between two
forward passes."""


class GroupStore:
    """The store through which the members of one group find each other; its rank 0 serves it until it is closed.

    Any thread may close it.  All who wait in the store then get an error, in this process and in others.
    """

    def __init__(self, address: str, port: int) -> None:
        """Serve the store.  Raises RuntimeError if the port is taken."""
        # Invariant: nothing else refers to the server.  Its destructor is all that stops it.
        self._server: distributed_c10d.Store | None = _connected(address, port, is_master=True)
        self.connection = _connected(address, port, is_master=False)
        """The connection through which this process's member waits."""

    @property
    def is_closed(self) -> bool:
        """Whether the store is served no longer."""
        return self._server is None

    def close(self) -> None:
        """Stop serving."""
        self._server = None


def _connected(address: str, port: int, *, is_master: bool) -> distributed_c10d.Store:
    # ``listening.bind_stores`` replaces the name in its module.
    store: distributed_c10d.Store = rendezvous.TCPStore(
        host_name=address,
        port=port,
        world_size=None,
        is_master=is_master,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,  # nothing ends that wait; members wait in the store instead
    )
    return store


class GroupStores:
    """The store of a rank's present update group.  A group may be given up before its turn comes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._given_up: set[str] = set()
        self._present: tuple[str, GroupStore] | None = None

    def of(self, name: str) -> GroupStore | None:
        """Return the store of the present group if that is its name."""
        with self._lock:
            return self._present[1] if self._present is not None and self._present[0] == name else None

    def add(self, name: str, store: GroupStore) -> None:
        """Make ``store`` the one of the present group; close it if the group was given up."""
        with self._lock:
            self._present = name, store
            is_given_up = name in self._given_up
        if is_given_up:
            store.close()

    def close(self) -> None:
        """Close the present store, if there is one."""
        with self._lock:
            present, self._present = self._present, None
        if present is not None:
            present[1].close()

    def give_up(self, name: str) -> None:
        """Close the group's store, now or when it is added."""
        with self._lock:
            self._given_up.add(name)
            present = self._present
        if present is not None and present[0] == name:
            present[1].close()


def join_update_group(
    store: GroupStore, world_size: int, group_name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Join the group as its rank 0 and return it.  Raises RuntimeError, at once if another thread closes the store.

    With gloo this waits for the other members, for at most ``JOIN_S``; with NCCL the first collective does.
    ``timeout_s`` limits the group's collectives with gloo.  With NCCL the waiting sides have deadlines
    (``weight_sender``, ``arrival``).  SGLang uses the same private names of torch on its side.
    """
    store.connection.set_timeout(timedelta(seconds=timeout_s))
    late = Timer(JOIN_S, store.close)
    late.daemon = True
    late.start()
    try:
        return make_group(store.connection, 0, world_size, name=group_name, backend=backend, timeout_s=timeout_s)
    except RuntimeError as error:
        if store.is_closed:
            raise RuntimeError("a member did not come, and the group was given up") from error
        raise
    finally:
        late.cancel()


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the bytes of all tensors, as ``load_format="flattened_bucket"`` receives them."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


@contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Run this thread's GPU work on a separate stream, in parallel with the main thread's work."""
    if device.type == "cpu":
        yield
        return
    # Each thread has a current device and stream.  On the default stream a broadcast would wait for a whole training
    # step.
    torch.cuda.set_device(device)  # a new thread starts with the first device
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
