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
    return Addresses(3, is_single_node=is_single_node, timeout_s=5.0)


def test_every_engine_the_router_and_the_trainer_choose_from_different_ports() -> None:
    async def shares() -> list[set[int]]:
        where, found = addresses(is_single_node=True), []
        for _ in range(20):
            engines = [await where.engine(actor(), number) for number in range(3)]
            found.append([*engines, await where.router(actor()), await where.rank(actor())])
        return [{port % 5 for _, *ports in each for port in ports} for each in zip(*found, strict=True)]

    each = asyncio.run(shares())
    assert all(len(share) == 1 for share in each)
    assert len(set.union(*each)) == 5


def test_on_several_machines_each_is_reached_by_its_own_address() -> None:
    assert asyncio.run(addresses(is_single_node=True).rank(actor()))[0] == "127.0.0.1"
    assert asyncio.run(addresses(is_single_node=False).rank(actor()))[0] == "10.0.0.7"
