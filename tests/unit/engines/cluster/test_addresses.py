"""The addresses and ports on which each process listens."""

import asyncio
from types import SimpleNamespace
from typing import Any

from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.engines.cluster.addresses import Addresses


def actor() -> Any:
    """An object that answers like a handle of a Ray actor."""

    async def free_ports(*about: int) -> tuple[int, ...]:
        return NetworkPlace().free_ports(*about)

    async def address() -> str:
        return "10.0.0.7"

    def method(remote: Any) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=remote))

    return SimpleNamespace(free_ports=method(free_ports), address=method(address))


def addresses(*, is_single_node: bool) -> Addresses:
    return Addresses(is_single_node=is_single_node, timeout_s=5.0)


def test_on_several_machines_each_is_reached_by_its_own_address() -> None:
    assert asyncio.run(addresses(is_single_node=True).rank(actor()))[0] == "127.0.0.1"
    assert asyncio.run(addresses(is_single_node=False).rank(actor()))[0] == "10.0.0.7"
