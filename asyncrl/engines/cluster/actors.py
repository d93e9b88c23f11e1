"""What runs inside Ray's worker processes.  Plain classes; ``placement.py`` makes actors of them.

An actor runs its methods on one thread, in order of calling; ``BESIDE`` is another thread of a trainer rank.
"""

import gc
import os
import random
import socket
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.engines.server_process import ServerProcess
from asyncrl.internals import naming_imports

BESIDE = "beside"
"""Ray's concurrency group for what cannot wait until a rank has trained.  Where an actor has such a group, its other
methods have a thread of their own, too, always the same, instead of the main thread."""
PORTS = range(20_000, 32_000)
"""Between the range that Ray gives to its workers (to 19,999) and the one that the kernel gives to outgoing connections
(from 32,768 on): a port chosen now is listened on only when its server has loaded, and must still be free then."""


class NetworkPlace:
    """Where an actor can be reached."""

    def address(self) -> str:
        """Of the node, as the other nodes see it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def free_ports(self, count: int, share: int = 0, num_shares: int = 1) -> tuple[int, ...]:
        """TCP ports that nobody listens on now; all different.

        Actors of a run may share a node and ask at the same time: those with other ``share`` never get the same ports.
        """
        ours = PORTS[share::num_shares]
        candidates = random.sample(ours, len(ours))
        return tuple(islice((port for port in candidates if _is_free(port)), count))


class ServerActor(NetworkPlace):
    """Starts one server process and watches over it; the server dies with the actor."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        """Start the server; returns before it is ready.  Raises ServerFailed."""
        self._server = ServerProcess(name, arguments, environment, log_path)

    def check(self) -> None:
        """Raises ServerFailed, with the cause from the log, when the server has ended."""
        if self._server is not None:
            self._server.raise_if_dead()

    def stop(self) -> None:
        """End the server and everything that it started."""
        if self._server is not None:
            self._server.stop()


class RankActor(NetworkPlace):
    """One trainer rank: ``start`` makes a ``MegatronRank``, ``call`` has it do what ``RayTrainer`` asks for."""

    def gpus(self) -> tuple[str, ...]:
        """Those that Ray gave to this actor, as ``CUDA_VISIBLE_DEVICES`` calls them."""
        import ray

        return tuple(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"]))

    def start(self, settings: TrainerSettings, rank: int, world_size: int, address: str, port: int) -> str:
        """Load the model and join the other ranks; say whose layers it has."""
        # SGLang sets this to 0 in its own processes; unless both sides agree, the first broadcast fails.
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        # Set and reset for each update group; one that is new then may move the others under native threads.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "0")
        if settings.device == "cpu":  # Ray hides no GPU from an actor that asked for none
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        with naming_imports():
            from asyncrl.engines.megatron.rank import MegatronRank

        self._rank = MegatronRank(settings, rank, world_size, address, port)
        gc.collect()
        gc.freeze()  # a full collection takes 0.3 s, perhaps within a weight update; a step leaves nothing to collect
        return self._rank.layers

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the rank, on the thread of the group that the caller names, or else on the other one."""
        return getattr(self._rank, method)(*args)


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
        return True
