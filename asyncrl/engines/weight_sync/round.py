"""What every way of updating weights has in common: all engines pause, receive the new weights, and resume.

pause all ──▶ receive: the updater's own ──▶ all resume
  └─ an engine dies anywhere here, or does not answer any more: UpdateInterrupted, once it is found dead, or has been
     ended for that; any other failure is final
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, Protocol

from asyncrl.engines.gather import gather
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import (
    AsyncRLError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    UpdateInterrupted,
    WeightUpdateFailed,
    plainly,
)
from asyncrl.types import UpdateReport

logger = logging.getLogger(__name__)

GiveUp = Callable[[], Awaitable[bool]]
"""Frees engines that wait for each other; whether that worked."""
PauseMode = Literal["in_place", "retract"]
"""Requests held by an update keep their KV cache, or give it up and compute it anew under the new weights."""

LOST_S = 30.0
"""For an engine to be found dead, or not, after an update has failed.  Others may have failed before it is: SGLang's
front takes 5 s to see that what has the GPU has ended."""

PROBE_S = 10.0
"""For an engine to answer at all, which it does between two forward passes."""


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

    async def probe(self, timeout_s: float) -> None:
        """Return once what has the GPU answers."""


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


class PausedRound[E: Pausable]:
    """Updates of the membership's engines, one at a time."""

    def __init__(
        self, membership: EngineMembership[E], *, timeout_s: float, pause_mode: PauseMode, lost_s: float
    ) -> None:
        """``timeout_s`` is for all pauses, and for all that go on; ``lost_s`` for the engine that caused a failure to
        be found dead."""
        self._membership = membership
        self.engines: tuple[E, ...] = ()
        """The engines of the next update; ones that rejoin later get another."""
        self.since = -1
        """The membership's change at which they were all that it had."""
        self._timeout_s = timeout_s
        self._pause_mode: PauseMode = pause_mode
        self._lost_s = lost_s
        self._is_mixed = False
        """Whether engines may have weights of two versions: they must not go on."""

    @property
    def is_outdated(self) -> bool:
        """Whether an engine was lost or has rejoined since ``choose``."""
        return self._membership.num_changes != self.since

    def choose(self) -> None:
        """Choose all engines that are there now for the next update."""
        self.engines, self.since = self._membership.present, self._membership.num_changes

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._membership.wait_for_rejoined()

    async def publish(
        self,
        receive: Callable[[], Awaitable[float | None]],
        num_bytes: int,
        give_up: GiveUp | None = None,
    ) -> UpdateReport:
        """Have the chosen engines ``receive`` ``num_bytes`` of weights; there may be none.

        ``receive`` returns when the first of them stood still, by the event loop's clock, if they say so; else that is
        when the first of them had answered.  ``give_up`` frees engines that wait for each other after a failure.
        After a failure to pause the engines go on; after that they stay paused, until an update succeeds, for their
        weights are neither the old nor the new ones.  Raises WeightUpdateFailed.
        """
        engines, clock = self.engines, asyncio.get_running_loop().time
        if not engines:
            return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)
        began = clock()
        async with self.blaming_the_lost(give_up):
            paused = await self._pause(engines)
            self._is_mixed = True
            stood_still = await receive()
            self._is_mixed = False
            await gather("going on", {engine.url: engine.go_on() for engine in engines}, self._timeout_s)
        self._membership.mark_synced(engines)
        pause_s = clock() - (paused if stood_still is None else stood_still)
        return UpdateReport(pause_s=pause_s, total_s=max(pause_s, clock() - began), num_bytes=num_bytes)

    @contextlib.asynccontextmanager
    async def blaming_the_lost(self, give_up: GiveUp | None = None) -> AsyncIterator[None]:
        """Make a WeightUpdateFailed an UpdateInterrupted if an engine has died since ``choose``.

        That is seen some time after its connection broke.  One that lives and does not answer is condemned, and dies.
        """
        try:
            yield
        except WeightUpdateFailed as error:
            if not self.is_outdated:
                await self._look_for_the_lost(give_up, str(error))
            if not self.is_outdated:
                raise
            raise UpdateInterrupted(str(error)) from error

    async def _look_for_the_lost(self, give_up: GiveUp | None, why: str) -> None:
        """Return once one is lost, all have answered, or it has taken too long."""
        logger.warning(
            "a weight update failed; looking for an engine that died or hangs, for %g s at most: %s", self._lost_s, why
        )
        try:
            async with asyncio.timeout(self._lost_s) as deadline:
                with plainly():
                    async with asyncio.TaskGroup() as tasks:
                        changed = tasks.create_task(
                            self._membership.wait_for_change(self.since), name="an engine is lost"
                        )
                        asking = tasks.create_task(self._ask_all(give_up, why), name="all answer")
                        changed.add_done_callback(lambda _: asking.cancel())
                        asking.add_done_callback(lambda _: changed.cancel())
        except TimeoutError:
            if not deadline.expired():  # a bug of who was asked
                raise

    async def _ask_all(self, give_up: GiveUp | None, why: str) -> None:
        """Return once all have answered, or one is lost; condemn the silent ones.

        Where none of several answers, or the one after an update that nobody could give up, that says nothing of them.
        """
        is_free = give_up is not None and await _gave_up(give_up)
        async with asyncio.TaskGroup() as tasks:
            probes = {each.url: tasks.create_task(_probed(each), name=f"probe {each.url}") for each in self.engines}
        found = {url: probe.result() for url, probe in probes.items()}
        if all(answer == "answers" for answer in found.values()):
            return
        if "answers" in found.values() or (is_free and len(found) == 1):
            for url in (url for url, answer in found.items() if answer == "silent"):
                self._membership.mark_unresponsive(url, f"lives and does not answer: {why}")
        await self._membership.wait_for_change(self.since)

    async def _pause(self, engines: Sequence[Pausable]) -> float:
        """When the first engine had answered."""
        answered: list[float] = []

        async def pause(engine: Pausable) -> None:
            await engine.pause(self._pause_mode)
            answered.append(asyncio.get_running_loop().time())

        try:
            await gather("pausing", {engine.url: pause(engine) for engine in engines}, self._timeout_s)
        except WeightUpdateFailed:
            if not self._is_mixed:
                await self._all_go_on(engines)
            raise
        return min(answered)

    async def _all_go_on(self, engines: Sequence[Pausable]) -> None:
        """Those that can: the failure to report is an earlier one."""

        async def go_on(engine: Pausable) -> None:
            with contextlib.suppress(AsyncRLError):
                await engine.go_on()

        with contextlib.suppress(WeightUpdateFailed):
            await gather("going on", {engine.url: go_on(engine) for engine in engines}, PROBE_S)


async def _gave_up(give_up: GiveUp) -> bool:
    """Whether that worked, within ``PROBE_S``."""
    try:
        async with asyncio.timeout(PROBE_S):
            return await give_up()
    except TimeoutError:
        return False


async def _probed(engine: Pausable) -> Literal["answers", "silent", "gone"]:
    try:
        await engine.probe(PROBE_S)
    except EngineTimeout:
        return "silent"
    except EngineRejected:  # another SGLang, which has no such command
        return "answers"
    except EngineError:  # it has died, or is about to be found dead
        return "gone"
    return "answers"
