"""The load of each server, as the server reports it."""

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.payload import UNREADABLE
from asyncrl.errors import EngineError
from asyncrl.task_groups import TaskGroup
from asyncrl.types import EngineLoad

_LOOK_S = 2.0
"""Deadline in seconds of one request.  A server answers within a forward pass; a later answer is out of date."""


class EngineLoads:
    """A ``LoadProbe`` over the engines whose URLs ``engine_urls`` returns."""

    def __init__(self, http: HttpClient, engine_urls: Callable[[], Sequence[str]]) -> None:
        self._http = http
        self._engine_urls = engine_urls

    async def loads(self) -> tuple[EngineLoad, ...]:
        """See ``LoadProbe.loads``.  The loads are in the order of the URLs."""
        async with TaskGroup() as looks:
            asked = [looks.create_task(self._look(url), name=f"load-{url}") for url in self._engine_urls()]
        return tuple(load for load in (task.result() for task in asked) if load is not None)

    async def _look(self, url: str) -> EngineLoad | None:
        try:
            answer = await self._http.look(f"{url}/v1/loads?include=core", _LOOK_S)
            return _load(answer["loads"])
        except (EngineError, *UNREADABLE):
            return None


def _load(ranks: list[dict[str, Any]]) -> EngineLoad | None:
    """Return the load of one server.  Of several data-parallel ranks the fullest counts, because it retracts first."""
    if not ranks:
        return None
    return EngineLoad(
        kv_used=max(rank["token_usage"] for rank in ranks),
        running=sum(rank["num_running_reqs"] for rank in ranks),
        waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
    )
