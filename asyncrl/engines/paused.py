"""What every way of updating weights has in common: all engines pause, take the new weights, and go on.

pause all ──▶ move: the updater's own ──▶ all go on
  └─ an engine dies anywhere here: UpdateInterrupted, once it is found dead; any other failure is final
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, Protocol

from asyncrl.engines.everyone import everyone
from asyncrl.engines.roster import Roster
from asyncrl.errors import AsyncRLError, UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import UpdateReport

PauseMode = Literal["in_place", "retract"]
"""Requests held by an update keep their KV cache, or give it up and compute it anew under the new weights."""

LOST_S = 30.0
"""For an engine to be found dead, or not, after an update has failed.  Others may have failed before it is: SGLang's
front takes 5 s to see that what has the GPU has ended."""


class Pausable(Protocol):
    """One engine.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    @property
    def url(self) -> str:
        """Its name."""

    async def pause(self, mode: PauseMode) -> None:
        """Hold every request where it is; ``mode`` says what becomes of its KV cache.

        May return while a forward pass still runs; other commands wait for its end.
        """

    async def go_on(self) -> None:
        """Let requests go on."""


class Stillness:
    """When the engines of one update stood still, by their own word and the event loop's clock."""

    def __init__(self) -> None:
        self._since: list[float | None] = []

    def note(self, seconds: float | None) -> None:
        """An engine has just said for how long it stands still, or (None) does not know."""
        self._since.append(None if seconds is None else asyncio.get_running_loop().time() - seconds)

    def first(self) -> float | None:
        """None unless all of them know."""
        known = [since for since in self._since if since is not None]
        return min(known) if known and len(known) == len(self._since) else None


class PausedRound:
    """Updates of the roster's engines, one at a time."""

    def __init__(self, roster: Roster[Pausable], *, timeout_s: float, pause_mode: PauseMode, lost_s: float) -> None:
        """``timeout_s`` is for all pauses, and for all that go on; ``lost_s`` for the engine that caused a failure to
        be found dead."""
        self._roster = roster
        self._timeout_s = timeout_s
        self._pause_mode: PauseMode = pause_mode
        self._lost_s = lost_s

    async def run(
        self, engines: Sequence[Pausable], since: int, move: Callable[[], Awaitable[float | None]], num_bytes: int
    ) -> UpdateReport:
        """Have ``engines``, which were the roster's at its change ``since``, take ``num_bytes`` by ``move``.

        ``move`` returns when the first of them stood still, by the event loop's clock, if they say so; else that is
        when the first of them had answered.
        After a failure to pause the engines go on; after that they stay paused, for their weights are neither the old
        nor the new ones.  Raises WeightUpdateFailed.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        async with self.blaming_the_lost(since):
            paused = await self._pause(engines)
            stood_still = await move()
            await everyone("going on", {engine.url: engine.go_on() for engine in engines}, self._timeout_s)
        self._roster.settle(engines)
        pause_s = clock() - (paused if stood_still is None else stood_still)
        return UpdateReport(pause_s=pause_s, total_s=max(pause_s, clock() - began), num_bytes=num_bytes)

    @contextlib.asynccontextmanager
    async def blaming_the_lost(self, since: int) -> AsyncIterator[None]:
        """Make a WeightUpdateFailed an UpdateInterrupted if an engine has died since the roster's change ``since``.

        That is seen some time after its connection broke.
        """
        try:
            yield
        except WeightUpdateFailed as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lost_s):
                    await self._roster.changed(since)
                raise UpdateInterrupted(str(error)) from error
            raise

    async def _pause(self, engines: Sequence[Pausable]) -> float:
        """When the first engine had answered."""
        answered: list[float] = []

        async def pause(engine: Pausable) -> None:
            await engine.pause(self._pause_mode)
            answered.append(asyncio.get_running_loop().time())

        try:
            await everyone("pausing", {engine.url: pause(engine) for engine in engines}, self._timeout_s)
        except WeightUpdateFailed:
            for engine in engines:
                with contextlib.suppress(AsyncRLError):  # the failure to report is the first one
                    await engine.go_on()
            raise
        return min(answered)
