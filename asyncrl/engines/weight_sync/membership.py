"""Which engines there are, and which of them have the trainer's weights.

    serving ──died──▶ lost ──started again──▶ waiting ──took part in an update──▶ serving
       └─ silent ──▶ condemned: who starts engines ends it ──▶ lost

Knows neither processes nor HTTP: who starts and asks engines tells it, and waits for it.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol


class Member(Protocol):
    """An engine."""

    @property
    def url(self) -> str:
        """The name that everybody calls it."""


class EngineMembership[M: Member]:
    """All engines of a run; one event loop's."""

    def __init__(self, members: Iterable[M]) -> None:
        """All are there, and get their first weights with the first update."""
        self._all: Mapping[str, M] = {member.url: member for member in members}
        self._lost = set[str]()
        self._waiting = set[str]()
        self._unresponsive = dict[str, str]()
        self._moved = asyncio.Event()
        self.num_changes = 0
        """How often one was lost or came back: a group that was formed before is of no use."""

    @property
    def present(self) -> tuple[M, ...]:
        """Those that can take weights, in a fixed order."""
        return tuple(member for url, member in self._all.items() if url not in self._lost)

    def mark_lost(self, url: str) -> None:
        """It has died; nothing, if it is lost already."""
        if url in self._lost:
            return
        self._lost.add(url)
        self._waiting.discard(url)
        self._unresponsive.pop(url, None)
        self._change()

    def mark_restarted(self, url: str) -> None:
        """It has been started again, with weights that are not the trainer's."""
        self._lost.discard(url)
        self._waiting.add(url)
        self._change()

    def mark_unresponsive(self, url: str, why: str) -> None:
        """It lives and is of no use; nothing, if it is lost by now."""
        if url not in self._lost:
            self._unresponsive[url] = why
            self._move()

    async def wait_until_unresponsive(self, url: str) -> str:
        """Return why, once this one is."""
        while url not in self._unresponsive:
            await self._moved.wait()
        return self._unresponsive[url]

    def mark_synced(self, members: Iterable[Member]) -> None:
        """These have the trainer's weights."""
        self._waiting.difference_update(member.url for member in members)
        self._move()

    async def wait_for_rejoined(self) -> None:
        """Return once an engine that was started again waits for weights."""
        while not self._waiting:
            await self._moved.wait()

    async def wait_until_synced(self, url: str) -> None:
        """Return once this one, which came back, has the trainer's weights."""
        while url in self._waiting:
            await self._moved.wait()

    async def wait_for_change(self, since: int) -> None:
        """Return once ``num_changes`` is not ``since`` any more."""
        while self.num_changes == since:
            await self._moved.wait()

    def _change(self) -> None:
        self.num_changes += 1
        self._move()

    def _move(self) -> None:
        """Wake everybody who waits now."""
        self._moved.set()
        self._moved = asyncio.Event()
