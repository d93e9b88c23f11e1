"""The choice of an engine for a request that does not go through the router."""

import asyncio
import math

AVOID_S = 10.0
"""Seconds for which a server that lost a request is chosen last."""
BUSIER_BY = 4
"""Requests that the preferred server may have more than the least busy one, whatever the ratio."""
BUSIER_TIMES = 1.5
"""Ratio of their requests up to which it is preferred: the default of the router's ``--balance-rel-threshold``."""
REMEMBERED_KEYS = 16_384
"""Routing keys whose server is remembered: more than the episodes that are open at once."""


class LeastBusy:
    """Chooses the server with the fewest requests of ours; servers that lost a request recently come last.

    A request with a routing key prefers the server of the key's last request, whose prefix cache may hold its tokens.
    """

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._busy = dict.fromkeys(urls, 0)
        self._avoid_until = dict.fromkeys(urls, float("-inf"))
        self._last: dict[str, str] = {}
        """The server of the last request of each routing key, least recently used first."""
        self._is_some = asyncio.Event()
        self._is_some.set()

    def add(self, url: str) -> None:
        """Add a server, with no requests."""
        self._busy[url], self._avoid_until[url] = 0, float("-inf")
        self._is_some.set()

    def remove(self, url: str) -> None:
        """Remove a server; requests on it end by themselves."""
        del self._busy[url], self._avoid_until[url]
        if not self._busy:
            self._is_some.clear()

    async def some(self) -> None:
        """Wait until there is at least one server."""
        while not self._busy:  # the server that ended the wait may be gone again
            await self._is_some.wait()

    @property
    def is_avoided(self) -> bool:
        """Whether every server lost a request recently."""
        return min(self._avoid_until.values(), default=math.inf) > asyncio.get_running_loop().time()

    def lease(self, routing_key: str | None = None) -> str:
        """Choose a server and count one more request on it until ``release``."""
        now = asyncio.get_running_loop().time()
        url = min(self._busy, key=lambda url: (self._avoid_until[url] > now, self._busy[url]))
        if routing_key is not None:
            url = self._preferred(routing_key, url, now)
        self._busy[url] += 1
        return url

    def _preferred(self, routing_key: str, least_busy: str, now: float) -> str:
        """Return the server of the last request, unless it is gone, avoided or much busier; remember the choice."""
        url = self._last.pop(routing_key, least_busy)
        busy, least = self._busy.get(url), self._busy[least_busy]
        is_far_busier = busy is None or (busy - least > BUSIER_BY and busy > BUSIER_TIMES * least)
        if is_far_busier or self._avoid_until[url] > now:
            url = least_busy
        self._last[routing_key] = url
        if len(self._last) > REMEMBERED_KEYS:
            del self._last[next(iter(self._last))]
        return url

    def release(self, url: str) -> None:
        """Count one request less.  No-op for a server that was removed."""
        if url in self._busy:
            self._busy[url] -= 1

    def avoid(self, url: str) -> None:
        """Choose this server last for ``AVOID_S`` seconds, because it lost a request."""
        if url in self._busy:
            self._avoid_until[url] = asyncio.get_running_loop().time() + AVOID_S
