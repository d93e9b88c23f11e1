"""The state of every engine: whether it is present, and whether it has the trainer's weights.

    serving ──died──▶ lost ──restarted──▶ waiting ──took part in an update──▶ serving
       └─ no answer, or out of reach ──▶ unresponsive ──ended by the supervisor──▶ lost

Uses neither processes nor HTTP: the supervisor and the weight updater report changes and wait for them.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol


class Member(Protocol):
    """An engine."""

    @property
    def url(self) -> str:
        """The engine's URL, which identifies it."""


class EngineMembership[M: Member]:
    """All engines of a run, for use in one event loop."""

    def __init__(self, members: Iterable[M]) -> None:
        """Start with all ``members`` present; they get their first weights with the first update."""
        # Invariant: only the event loop's thread uses this object, and no method awaits between a change and
        # ``_wake_waiters``.  A waiter that checks its condition before the change therefore always sees it.
        self._all: Mapping[str, M] = {member.url: member for member in members}
        self._lost = set[str]()
        self._waiting = dict[str, int]()
        """``num_changes`` at the restart of each engine that waits for weights, by its URL."""
        self._unresponsive = dict[str, str]()
        self._changed_event = asyncio.Event()
        self.num_changes = 0
        """The number of losses and restarts of engines.  A group formed before the last one is of no use."""

    @property
    def present(self) -> tuple[M, ...]:
        """The engines that can receive weights, in a fixed order."""
        return tuple(member for url, member in self._all.items() if url not in self._lost)

    @property
    def waiting(self) -> tuple[M, ...]:
        """The restarted engines that wait for the trainer's weights."""
        return tuple(member for member in self.present if member.url in self._waiting)

    def mark_lost(self, url: str) -> None:
        """Mark an engine that has died.  No-op if it is already lost."""
        if url in self._lost:
            return
        self._lost.add(url)
        self._waiting.pop(url, None)
        self._unresponsive.pop(url, None)
        self._change()

    def mark_restarted(self, url: str) -> None:
        """Mark an engine that was started again, and has other weights than the trainer."""
        self._lost.discard(url)
        self._waiting[url] = self.num_changes + 1
        self._change()

    def move(self, url: str, member: Any) -> None:
        """Replace a lost engine by ``member``, an ``M`` at another URL, which is lost as well."""
        # Not annotated as M: it would not be covariant, and each updater sees the engines as its own Protocol.
        self._all = {each.url: each for each in (member if known == url else at for known, at in self._all.items())}
        self._lost.discard(url)
        self._lost.add(member.url)

    def mark_unresponsive(self, url: str, why: str) -> None:
        """Mark a running engine that must be restarted because of ``why``.  No-op if it is already lost."""
        if url not in self._lost:
            self._unresponsive[url] = why
            self._wake_waiters()

    async def wait_until_unresponsive(self, url: str) -> str:
        """Return the reason once this engine is unresponsive."""
        while url not in self._unresponsive:
            await self._changed_event.wait()
        return self._unresponsive[url]

    def mark_synced(self, members: Iterable[Member], since: int) -> None:
        """Mark engines that have received the trainer's weights; they were chosen when ``num_changes`` was ``since``.

        An engine that was restarted after that may have lost them again, and keeps waiting.
        """
        for member in members:
            if self._waiting.get(member.url, since) <= since:
                self._waiting.pop(member.url, None)
        self._wake_waiters()

    async def wait_for_rejoined(self) -> None:
        """Return once a restarted engine waits for weights."""
        while not self._waiting:
            await self._changed_event.wait()

    async def wait_until_synced(self, url: str) -> None:
        """Return once this restarted engine has the trainer's weights."""
        while url in self._waiting:
            await self._changed_event.wait()

    async def wait_until_lost(self, urls: Iterable[str]) -> None:
        """Return once all these engines are lost."""
        while not self._lost.issuperset(urls):
            await self._changed_event.wait()

    async def wait_for_change(self, since: int) -> None:
        """Return once ``num_changes`` differs from ``since``."""
        while self.num_changes == since:
            await self._changed_event.wait()

    def _change(self) -> None:
        self.num_changes += 1
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Wake all current waiters; each checks its condition again."""
        self._changed_event.set()
        self._changed_event = asyncio.Event()
