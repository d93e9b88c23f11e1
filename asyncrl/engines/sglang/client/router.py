"""The router's list of engines, read and changed while it runs."""

from typing import Any

from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.payload import UNREADABLE
from asyncrl.errors import EngineError, EngineLost

LIST_S = 5.0
"""Deadline in seconds of one request.  The router answers at once, also while it starts to use an engine."""


async def listed(http: HttpClient, router_url: str) -> dict[str, str]:
    """Return the router's id of each engine by the engine's URL.  Raises EngineError, also if the router hangs."""
    answer: Any = await http.look(f"{router_url}/workers", LIST_S)
    try:
        return {worker["url"]: worker["id"] for worker in answer["workers"]}
    except UNREADABLE as error:
        raise EngineLost(f"{router_url} sent a list that the router never sends: {answer!r:.200}") from error


async def introduce(http: HttpClient, router_url: str, url: str, gone: set[str]) -> None:
    """Have the router use the engine at ``url`` once it is healthy, and no longer those in ``gone``.

    Raises EngineError.
    """
    await remove(http, router_url, gone)
    if url not in await listed(http, router_url):
        await http.command(f"{router_url}/workers", {"url": url, **http.key_of_worker}, LIST_S)


async def remove(http: HttpClient, router_url: str, gone: set[str]) -> None:
    """Have the router no longer use the engines in ``gone``, which then has none that the router does not know.

    Raises EngineError.
    """
    known = await listed(http, router_url)
    gone.intersection_update(known)
    # Invariant: an engine leaves ``gone`` before the await, because other calls have the same set: the router refuses
    # to remove an engine twice.
    while gone & known.keys():
        each = (gone & known.keys()).pop()
        gone.discard(each)
        try:
            await http.delete(f"{router_url}/workers/{known[each]}", LIST_S)
        except EngineError:
            gone.add(each)
            raise
