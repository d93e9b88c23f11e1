"""Requests go to the engine with the fewest, and those of one episode to the same engine."""

import asyncio

from asyncrl.engines.sglang.client.least_busy import BUSIER_BY, REMEMBERED_KEYS, LeastBusy
from tests.virtual_time import run_virtually

URLS = ("one", "two")


def leased(servers: LeastBusy, *keys: str | None) -> list[str]:
    """The servers of requests with these routing keys, in order."""

    async def lease() -> list[str]:
        return [servers.lease(key) for key in keys]

    return run_virtually(lease())[0]


def test_requests_without_a_key_alternate() -> None:
    assert leased(LeastBusy(URLS), None, None, None, None) == ["one", "two", "one", "two"]


def test_requests_of_one_key_go_to_the_server_of_its_last_request() -> None:
    servers = LeastBusy(URLS)
    first = leased(servers, "a", "b", "b", "a", "a")
    assert first == ["one", "two", "two", "one", "one"]
    for url in first:
        servers.release(url)
    assert leased(servers, "b", "a") == ["two", "one"]


def test_a_server_that_is_much_busier_is_left_and_its_successor_is_remembered() -> None:
    servers = LeastBusy(URLS)
    assert leased(servers, *["a"] * (BUSIER_BY + 1)) == ["one"] * (BUSIER_BY + 1)
    assert leased(servers, "a", "a") == ["two", "two"]


def test_a_server_that_is_gone_or_lost_a_request_is_left() -> None:
    async def left() -> list[str]:
        servers = LeastBusy(URLS)
        found = [servers.lease("a")]
        servers.avoid("one")
        found.append(servers.lease("a"))
        servers.remove("two")
        return [*found, servers.lease("a")]

    assert run_virtually(left())[0] == ["one", "two", "one"]


def test_old_keys_are_forgotten() -> None:
    servers = LeastBusy(("one",))
    leased(servers, *map(str, range(REMEMBERED_KEYS + 10)))
    assert len(servers._last) == REMEMBERED_KEYS  # noqa: SLF001


def test_a_request_waits_on_if_the_only_server_is_gone_again_at_once() -> None:
    async def run() -> str:
        servers = LeastBusy(("one",))
        servers.remove("one")

        async def lease() -> str:
            await servers.some()
            return servers.lease()

        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(lease())
            await asyncio.sleep(1.0)
            servers.add("one")
            servers.remove("one")
            await asyncio.sleep(1.0)
            servers.add("two")
        return leasing.result()

    assert run_virtually(run()) == ("two", 2.0)
