"""Finds engines that decode far slower than the others.  Uses neither processes nor HTTP.

    every OBSERVE_EVERY_S: speed of each engine ─▶ ratio to the medians ─▶ below the share NUM_BELOW times ─▶ slow

A batch with more requests decodes more tokens per second in all, and fewer for each request.  A healthy engine is thus
at the median at least once: in tokens per second if it has more requests than the others, and in tokens per second and
request if it has fewer.  Its ratio is the higher of both, so that engines with unlike loads can be compared.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

OBSERVE_EVERY_S = 10.0
"""Seconds between two observations.  SGLang measures its speed anew after 40 forward passes, mostly within 2 s."""
NUM_BELOW = 6
"""Observations below the share, without one above it between them, after which an engine is slow: almost a minute.

A restart takes minutes, so a long prefill or one stall must not cause one.
"""
MIN_ENGINES = 3
"""Engines whose speeds have a median worth the name."""
MIN_RUNNING = 4
"""Running requests below which a speed says little: the last answers of a batch are long, and decode slowly."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSpeed:
    """The decoding speed of an engine, as it measured it last."""

    tokens_per_s: float
    """The sum over all requests; 0 if it has measured nothing since a pause."""
    running: int
    """Requests being decoded."""

    @property
    def per_request(self) -> float:
        """Tokens per second and request."""
        return self.tokens_per_s / self.running


class SlowEngines:
    """Finds the slow engines of a run, for use in one event loop.

    More than half of all ``num_engines``, and at least two, always continue to serve.
    """

    def __init__(self, share: float, num_engines: int) -> None:
        """``share`` of the median speed is the least that a healthy engine reaches."""
        # Invariant: only the event loop's thread uses this object, and no method awaits between a change of ``_slow``
        # and setting the event.  A waiter that looked before the change therefore always wakes.
        self._share = share
        self._min_left = max(2, num_engines // 2 + 1)
        self._last = dict[str, DecodingSpeed]()
        """The speeds of the last observation, by URL."""
        self._measured = dict[str, DecodingSpeed]()
        """The last fresh speed by URL.

        The others are idle while the run waits for the answers of the slow engine, and are compared by their earlier
        speed.
        """
        self._below = dict[str, int]()
        """Observations in a row in which an engine was below the share, by URL."""
        self._slow = dict[str, str]()
        """The reason by URL."""
        self._kept = set[str]()
        """Slow engines that must continue to serve; each was reported once."""
        self._found_event = asyncio.Event()
        self.num_found = 0
        """Engines found slow so far."""

    def observe(self, speeds: Mapping[str, DecodingSpeed | None]) -> None:
        """Take one observation of all serving engines, by URL; None for an engine that did not answer.

        At most one engine is found slow at once, because the median changes without it.
        """
        answers = {url: speed for url, speed in speeds.items() if speed is not None}
        fresh = {url: speed for url, speed in answers.items() if self._is_fresh(url, speed)}
        self._last = answers
        self._measured = {url: speed for url, speed in (self._measured | fresh).items() if url in speeds}
        if len(self._measured) < MIN_ENGINES:
            return
        together = median(speed.tokens_per_s for speed in self._measured.values())
        each = median(speed.per_request for speed in self._measured.values())
        ratios = {url: max(speed.tokens_per_s / together, speed.per_request / each) for url, speed in fresh.items()}
        for url, ratio in ratios.items():
            self._below[url] = self._below.get(url, 0) + 1 if ratio < self._share else 0
        self._kept.intersection_update(url for url, below in self._below.items() if below)
        slow = [url for url in ratios if self._below[url] >= NUM_BELOW and url not in self._slow]
        if slow:
            self._report(min(slow, key=ratios.__getitem__), each, len(speeds.keys() - self._slow.keys()))

    async def wait_until_slow(self, url: str) -> str:
        """Return the reason once this engine is slow; observations before the call do not count."""
        for known in (self._below, self._last, self._measured, self._slow):
            known.pop(url, None)
        while url not in self._slow:
            await self._found_event.wait()
        return self._slow[url]

    def _is_fresh(self, url: str, speed: DecodingSpeed) -> bool:
        """Whether the speed says something, and was measured since the last observation.

        An engine measures nothing while it is paused or only prefills, and then reports its last speed again.
        """
        last = self._last.get(url)
        is_new = last is None or last.tokens_per_s != speed.tokens_per_s
        return speed.running >= MIN_RUNNING and speed.tokens_per_s > 0 and is_new

    def _report(self, url: str, usual: float, num_serving: int) -> None:
        """Find the engine slow, or warn once if too few engines would be left."""
        why = (
            f"decodes {self._measured[url].per_request:.1f} tokens/s per request, and the median of "
            f"{len(self._measured)} engines is {usual:.1f} (--slow-engine-share {self._share:g})"
        )
        if num_serving > self._min_left:
            self.num_found += 1
            self._slow[url] = f"{why}; its requests continue on other engines"
            self._found_event.set()
            self._found_event = asyncio.Event()
        elif url not in self._kept:
            self._kept.add(url)
            logger.warning("%s %s; it stays, because at least %d engines must serve", url, why, self._min_left)
