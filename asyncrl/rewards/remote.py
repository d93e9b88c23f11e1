"""Rewards from an HTTP service (``--rm-type remote_rm``).

consumes      answers
produces      their rewards
waits for     a free connection; the service, within a deadline per attempt; a pause before each retry
on failure    an attempt is repeated after 1, 2, 4 ... 30 s; RewardFailed after MOST_ATTEMPTS, and at once for a 4xx
              status other than 408 and 429
on outage     while no attempt succeeds, attempts without a connection do not count; no new group starts
              if training needs the service
on cancel     the request is closed
"""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

import aiohttp

from asyncrl.errors import RewardFailed
from asyncrl.event_loop import Deadline, loop_time

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 10
"""Attempts at one answer, at most; slime's number."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before an attempt, in seconds, without jitter."""
OUTAGE = 3
"""Failed attempts in a row, over all answers, from which the service counts as down."""
QUOTED = 200
"""Characters of an error page that an error message quotes, at most."""
_REPEATED = frozenset({408, 429})

Send = Callable[[str, dict[str, Any]], Any]
"""Sends JSON to a URL and returns the status and the JSON, or the text, of the reply."""


class Unavailable(Exception):
    """An attempt failed, and another may succeed.

    ``reached`` is False only if there was no connection.  Any other failure may be the answer's fault: one that makes
    the service disconnect, or its proxy report 502 to 504, must not hold up the run forever.
    """

    def __init__(self, text: str, *, reached: bool) -> None:
        super().__init__(text)
        self.reached = reached


class RemoteService:
    """One service, with its retries and its record of successes.  One per URL and run."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, concurrency: int, timeout_s: float) -> None:
        self.url = url
        self._session = session
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s
        self._failures = 0
        self._down_since: float | None = None
        self._last_error = ""
        self._num_waiting = 0
        self._told = False
        self._changed: list[Callable[[], None]] = []
        self.holds_groups = False
        """Whether no new group starts during an outage; set for the services of training."""

    @property
    def reason(self) -> str | None:
        """A line on who waits for whom, while every attempt fails and answers wait; None otherwise."""
        if self._failures < OUTAGE or self._num_waiting == 0 or self._down_since is None:
            return None
        return (
            f"every call to {self.url} has failed for {loop_time() - self._down_since:.0f} s (last: "
            f"{self._last_error}); {self._num_waiting} answers wait for it"
            f"{', and no new group starts' if self.holds_groups else ''}"
        )

    def notify(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever ``reason`` may have changed."""
        self._changed.append(changed)

    async def score(self, prompt: str, response: str, label: Any) -> Any:
        """Return the JSON value that the service replies.  Raises RewardFailed."""
        payload, counted, failures = {"prompt": prompt, "response": response, "label": label}, 0, 0
        self._num_waiting += 1
        try:
            while True:
                try:
                    async with self._slots:
                        value = await self._attempt(payload)
                except Unavailable as error:
                    failures += 1
                    self._failed(error)
                    counted += error.reached or self._failures < OUTAGE
                    if counted >= MOST_ATTEMPTS:
                        raise RewardFailed(f"{self.url}: {failures} attempts, the last: {error}") from error
                    await asyncio.sleep(_pause_s(failures))
                else:
                    self._succeeded()
                    return value
        finally:
            self._num_waiting -= 1
            self._tell()

    async def _attempt(self, payload: dict[str, Any]) -> Any:
        """Send one request.  Raises Unavailable if another attempt may succeed, RewardFailed otherwise."""
        try:
            async with Deadline(self._timeout_s):
                status, reply = await self._post(payload)
        except TimeoutError:
            raise Unavailable(f"no reply within {self._timeout_s:g} s", reached=True) from None
        except (aiohttp.ClientError, OSError) as error:
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            raise Unavailable(f"{type(error).__name__}: {error}", reached=reached) from error
        if status >= 500 or status in _REPEATED:
            raise Unavailable(f"status {status}: {reply!s:.{QUOTED}}", reached=True)
        if status >= 400:
            self._succeeded()  # the service works, and refuses this answer
            raise RewardFailed(f"{self.url}: status {status}: {reply!s:.{QUOTED}}")
        return reply

    async def _post(self, payload: dict[str, Any]) -> tuple[int, Any]:
        async with self._session.post(self.url, json=payload) as response:
            if response.status >= 400:
                return response.status, (await response.text(errors="replace")).strip()
            try:
                return response.status, await response.json(content_type=None)
            except ValueError:
                text = await response.text(errors="replace")
                raise RewardFailed(f"{self.url}: the reply is not JSON: {text[:QUOTED]!r}") from None

    def _failed(self, error: Unavailable) -> None:
        self._failures += 1
        self._last_error = str(error)
        if self._down_since is None:
            self._down_since = loop_time()
        if self._failures >= OUTAGE and not self._told:
            self._told = True
            logger.warning("%s; they are tried again until one succeeds", self.reason)
        self._tell()

    def _succeeded(self) -> None:
        if self._told and self._down_since is not None:
            logger.warning(
                "%s answers again after %.0f s%s",
                self.url,
                loop_time() - self._down_since,
                "; groups start again" if self.holds_groups else "",
            )
        self._failures, self._down_since, self._told = 0, None, False
        self._tell()

    def _tell(self) -> None:
        for changed in self._changed:
            changed()


def _pause_s(failures: int) -> float:
    return min(2.0 ** (failures - 1), LONGEST_PAUSE_S) + random.random()
