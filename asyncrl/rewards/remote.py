"""Rewards from an HTTP service (``--rm-type remote_rm``).

consumes      answers
produces      their rewards
waits for     a free connection; the service, within a deadline per attempt; a pause before each retry
on failure    an attempt is repeated after 1, 2, 4 ... 30 s; RewardFailed after MOST_ATTEMPTS, and at once for a 4xx
              status other than 408 and 429
on outage     while no attempt succeeds, one answer at a time is tried, and attempts without a connection do not count;
              no new group starts if training needs the service
on cancel     the request is closed
"""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp

from asyncrl.errors import RewardFailed, RewardUnavailable
from asyncrl.event_loop import Deadline
from asyncrl.outages import OUTAGE_S, CircuitBreaker

QUOTED = 200
"""Characters of an error page that an error message quotes, at most."""
_REPEATED = frozenset({408, 429})

Send = Callable[[str, dict[str, Any]], Any]
"""Sends JSON to a URL and returns the status and the JSON, or the text, of the reply."""


class RemoteService:
    """One service, with its retries and its record of successes.  One per URL and run."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        concurrency: int,
        timeout_s: float,
        outage_limit_s: float = OUTAGE_S,
    ) -> None:
        self.url = url
        self.breaker = CircuitBreaker(url, limit_s=outage_limit_s)
        """Its record of successes."""
        self._session = session
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s

    async def score(self, prompt: str, response: str, label: Any) -> Any:
        """Return the JSON value that the service replies.  Raises RewardFailed."""
        payload = {"prompt": prompt, "response": response, "label": label}
        try:
            return await self.breaker.call(lambda: self._attempt(payload))
        except RewardFailed as error:
            raise RewardFailed(f"{self.url}: {error}") from error

    async def _attempt(self, payload: dict[str, Any]) -> Any:
        """Send one request.  Raises RewardUnavailable if another attempt may succeed, RewardFailed otherwise."""
        try:
            async with self._slots, Deadline(self._timeout_s):
                status, reply = await self._post(payload)
        except TimeoutError:
            raise RewardUnavailable(f"no reply within {self._timeout_s:g} s", True) from None
        except (aiohttp.ClientError, OSError) as error:
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            raise RewardUnavailable(f"{type(error).__name__}: {error}", reached) from error
        if status >= 500 or status in _REPEATED:
            raise RewardUnavailable(f"status {status}: {reply!s:.{QUOTED}}", True)
        if status >= 400:
            raise RewardFailed(f"status {status}: {reply!s:.{QUOTED}}")
        return reply

    async def _post(self, payload: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(self.url, json=payload) as response:
            if response.status >= 400:
                return response.status, (await response.text(errors="replace")).strip()
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                text = await response.text(errors="replace")
                raise RewardFailed(f"the reply is not JSON: {text[:QUOTED]!r}") from None
