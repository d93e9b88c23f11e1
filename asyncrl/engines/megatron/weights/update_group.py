"""The process group through which weights reach the engines: rank 0 is ours, the others are SGLang's.

SGLang's ``sglang.srt.utils.common.init_custom_process_group`` and ``FlattenedTensorBucket`` do the same, but importing
them takes 4 to 9 s and 1,700 modules.  ``tests/engines/megatron/weights/test_update_group.py`` compares the two.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock
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
RELEASE_S = 5.0
"""The deadline for each connection that releases a thread from its wait for members, in seconds."""


class GroupStore:
    """The store through which the members of one group find each other; its rank 0 serves it until it is closed.

    Any thread may close it, also while another one waits for the members.  All who wait in the store then get an error,
    in this process and in others.
    """

    def __init__(self, address: str, port: int, world_size: int) -> None:
        """Serve the store.  Raises RuntimeError if the port is taken."""
        self._address = address
        self._port = port
        self._world_size = world_size
        self._lock = Lock()
        self._is_closed = False
        self._is_waiting = False
        # Invariant: nothing else refers to this object, and to that of ``met`` only ``met``.  Their destructors are all
        # that stops the server, which they share.
        self._server: distributed_c10d.Store | None = self._connected(JOIN_S, is_master=True, wait_for_workers=False)

    def met(self, timeout_s: float) -> distributed_c10d.Store:
        """Wait for all members, for at most ``JOIN_S``, and return a connection to the store.

        ``timeout_s`` limits later waits in the store.  Raises RuntimeError, at once if the store is closed.
        """
        with self._lock:
            self._raise_if_closed()
            self._is_waiting = True
        try:
            self._connected(min(timeout_s, JOIN_S), is_master=True)
        finally:
            self._is_waiting = False
        with self._lock:  # held until there is a connection: connecting to a closed server would wait
            self._raise_if_closed()
            return self._connected(timeout_s)

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._is_closed, self._server = True, None
        if self._is_waiting:  # torch has no way to end it: come in the place of all members
            with suppress(RuntimeError):
                for _ in range(1, self._world_size):
                    self._connected(RELEASE_S)

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the group was given up")

    def _connected(
        self, timeout_s: float, *, is_master: bool = False, wait_for_workers: bool = True
    ) -> distributed_c10d.Store:
        """Return a connection, which counts as a member; with ``is_master``, one that serves the store as well.

        With both flags, it returns once all members have come.
        """
        # ``listening.bind_stores`` replaces the name in its module.
        store: distributed_c10d.Store = rendezvous.TCPStore(
            host_name=self._address,
            port=self._port,
            world_size=self._world_size,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=wait_for_workers,
            multi_tenant=True,  # of several that serve one port, the first one starts the server
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
    """Wait until all members have joined, for at most ``JOIN_S``, and return the group.  Raises RuntimeError.

    ``timeout_s`` limits the group's collectives with gloo.  With NCCL the waiting sides have deadlines
    (``weight_sender``, ``arrival``).  SGLang uses the same private names of torch on its side.
    """
    return make_group(store.met(timeout_s), 0, world_size, name=group_name, backend=backend, timeout_s=timeout_s)


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
