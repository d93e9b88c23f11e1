"""The addresses on which the servers and the trainer of a run listen; on a single node only the loopback interface."""

from typing import Any

from asyncrl.engines.cluster.actors import CONCURRENT
from asyncrl.engines.cluster.calls import answered
from asyncrl.errors import ServerFailed


class Addresses:
    """Asks actors for their addresses.  Every method raises ServerFailed."""

    def __init__(self, *, is_single_node: bool, timeout_s: float) -> None:
        self._is_single_node = is_single_node
        self._timeout_s = timeout_s

    async def engine(self, actor: Any) -> tuple[str, int, int]:
        """Return an engine's host, its port, and the port of its ranks' rendezvous."""
        host, (port, nccl_port) = await self._of(actor, 2)
        return host, port, nccl_port

    async def router(self, actor: Any) -> tuple[str, int, int]:
        """Return the router's host, its port, and the port of its metrics."""
        host, (port, prometheus_port) = await self._of(actor, 2)
        return host, port, prometheus_port

    async def rank(self, actor: Any) -> tuple[str, int]:
        """Return the host of a trainer rank and a free port there; possible while the rank trains."""
        host, (port,) = await self._of(actor, 1, concurrency_group=CONCURRENT)
        return host, port

    async def _of(self, actor: Any, num_ports: int, **options: str) -> tuple[str, tuple[int, ...]]:
        call = actor.free_ports.options(**options).remote(num_ports)
        ports = await answered(call, "an actor's ports", self._timeout_s, ServerFailed)
        if self._is_single_node:
            return "127.0.0.1", ports
        call = actor.address.options(**options).remote()
        return await answered(call, "an actor's address", self._timeout_s, ServerFailed), ports
