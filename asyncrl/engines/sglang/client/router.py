"""The router's list of engines, read and changed while it runs."""

from typing import Any

from asyncrl.engines.sglang.client.http import HttpClient

LIST_S = 5.0
"""Deadline in seconds of one request.  The router answers at once, also while it starts to use an engine."""


async def listed(http: HttpClient, router_url: str) -> dict[str, str]:
    """Return the router's id of each engine by the engine's URL.  Raises EngineError, also if the router hangs."""
    answer: Any = await http.look(f"{router_url}/workers", LIST_S)
    return {worker["url"]: worker["id"] for worker in answer["workers"]}


async def introduce(http: HttpClient, router_url: str, url: str, gone: set[str]) -> None:
    """Have the router use the engine at ``url`` once it is healthy, and no longer those in ``gone``, which is emptied.

    Raises EngineError.
    """
    known = await listed(http, router_url)
    for each in gone & known.keys():
        await http.delete(f"{router_url}/workers/{known[each]}", LIST_S)
    gone.clear()
    if url not in known:
        await http.command(f"{router_url}/workers", {"url": url, **http.key_of_worker}, LIST_S)
