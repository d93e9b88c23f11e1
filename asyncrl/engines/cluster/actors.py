"""Classes that run inside Ray's worker processes; ``placement.py`` makes actors of them.

An actor runs its methods on one thread, in the order of the calls.  A trainer rank has three more threads,
``CONCURRENT``, ``ABANDON`` and ``WATCH``.
"""

import gc
import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.engines.listening import gloo_variables, loopback_variables
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.server_process import ServerProcess
from asyncrl.errors import ServerFailed, TrainerOutOfMemory, first_line
from asyncrl.internals import naming_imports
from asyncrl.quick_imports import cpu_imports, quick_imports

if TYPE_CHECKING:  # the driver imports no torch
    from asyncrl.engines.megatron.rank import MegatronRank

CONCURRENT = "concurrent"
"""Ray's concurrency group for calls that cannot wait until a training step has ended.

In an actor with such a group, all other methods also leave the main thread: they run on one dedicated thread, always
the same.
"""
ABANDON = "abandon"
"""Ray's concurrency group for the call that ends the wait of one in ``CONCURRENT``."""
WATCH = "watch"
"""Ray's concurrency group for pings, which are answered whatever the other threads do."""
PORTS = range(20_000, 32_000)
"""Ports for servers.

They lie between Ray's range for its workers (to 19,999) and the kernel's for outgoing connections (from 32,768).  A
server listens on its port only once it has loaded, and the port must still be free then.
"""
_RESERVATIONS: list[int] = []
"""Descriptors of sockets.  A socket object would warn when the process ends that nothing closed it."""


class NetworkPlace:
    """The network address and free ports of an actor's node."""

    def address(self) -> str:
        """Return the node's IP address, as other nodes see it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_ports(self, count: int) -> tuple[int, ...]:
        """Return ``count`` different TCP ports that no process listens on now.  Raises ServerFailed if there are fewer.

        No other process of this node, of this run or another, gets one of them from this method before this process
        ends or calls it again: a server that did not start at the earlier ports no longer needs them.
        """
        while _RESERVATIONS:
            os.close(_RESERVATIONS.pop())
        reserved = reserve_ports(count)
        _RESERVATIONS.extend(reserved.values())
        return tuple(reserved)


class ServerActor(NetworkPlace):
    """Starts one server process and reports whether it is alive; the server dies with the actor."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    def start(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path, key: str
    ) -> None:
        """Start the server; returns before it is ready.  Raises ServerFailed."""
        found = gloo_variables(self.address())
        self._server = ServerProcess(name, arguments, {**found, **environment}, log_path, key)

    def check(self) -> None:
        """Raise ServerFailed, with the cause from the log, if the server has ended."""
        if self._server is not None:
            self._server.raise_if_dead()

    def stop(self) -> None:
        """End the server and all processes that it started."""
        if self._server is not None:
            self._server.stop()


class RankActor(NetworkPlace):
    """One trainer rank: ``start`` creates a ``MegatronRank``, ``call`` calls its methods for ``RayTrainer``."""

    _rank: "MegatronRank | None" = None
    """None until ``start`` has made it."""

    def gpus(self) -> tuple[str, ...]:
        """Return the GPUs that Ray gave to this actor, as in ``CUDA_VISIBLE_DEVICES``."""
        import ray

        return tuple(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))

    def ping(self) -> None:
        """Answer, as a sign of life."""

    def start(self, settings: TrainerSettings, rank: int, world_size: int, address: str, port: int) -> str:
        """Load the model and join the other ranks; return which implementation of layers it uses."""
        # SGLang sets this to 0 in its processes; unless both sides agree, the first broadcast fails.
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        # Invariant: the variable exists before any native thread.  Each update group sets and resets it; adding it then
        # could move the environment while native threads read it.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "0")
        os.environ.update(loopback_variables(address) or gloo_variables(self.address()))
        if settings.device == "cpu":  # Ray hides no GPU from an actor that requested none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with naming_imports(), _imports_for(settings.device):
            from asyncrl.engines.megatron.rank import MegatronRank

        self._rank = MegatronRank(settings, rank, world_size, address, port)
        gc.collect()
        gc.freeze()  # a full collection takes 0.3 s, possibly during a weight update, and a step leaves it no garbage
        return self._rank.layers

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the rank, on the thread of the caller's concurrency group, by default the main group's.

        Raises TrainerOutOfMemory in the place of torch's error, with which the driver would have to import torch, and
        RuntimeError before ``start`` has made the rank: one that starts again may be asked on another thread.
        """
        if self._rank is None:
            raise RuntimeError("the rank has not started yet")
        try:
            return getattr(self._rank, method)(*args, **kwargs)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            raise TrainerOutOfMemory(f"{method}: {first_line(error)}") from None


def _imports_for(device: str) -> AbstractContextManager[None]:
    """The context in which to import Megatron."""
    if device != "cpu":
        return quick_imports()
    from asyncrl.engines.megatron import UNUSED_ON_CPU

    return cpu_imports(*UNUSED_ON_CPU)


def reserve_ports(count: int) -> dict[int, int]:
    """Return ``count`` different TCP ports without a listener, each with the descriptor that reserves it until closed.

    Raises ServerFailed if there are fewer ports.
    """
    reserved: dict[int, int] = {}
    for port in random.sample(PORTS, len(PORTS)):
        if len(reserved) == count:
            break
        if (descriptor := _reservation(port)) is None:
            continue
        if _is_free(port):
            reserved[port] = descriptor
        else:
            os.close(descriptor)
    if len(reserved) < count:
        for descriptor in reserved.values():
            os.close(descriptor)
        raise ServerFailed(f"{count} free ports are needed, and {PORTS[0]} to {PORTS[-1]} have {len(reserved)}")
    return reserved


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
        return True


def _reservation(port: int) -> int | None:
    """Reserve ``port``; return the descriptor of the reservation, or None if the port has one.

    The reservation is a Unix socket without a file (unix(7), "abstract"), which ends with the process.
    """
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0asyncrl-port-{port}")
    except OSError:
        reservation.close()
        return None
    return reservation.detach()
