"""The watchdog: ends a run in which neither a token nor a group arrives, or whose rewards are away for too long."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.errors import AsyncRLError, RewardOutage, Stalled
from asyncrl.event_loop import Deadline, loop_time
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.protocols import AdmissionHold

_FOREVER_S = 1e9
"""Thirty years, in seconds: a time that an outage can still make shorter."""


class Watchdog:
    """Raises Stalled if neither a token nor a group arrives for ``watchdog_timeout_s`` seconds during a ``wait``.

    During an outage of the rewards' service that time does not count, and RewardOutage is raised at its limit.
    """

    def __init__(self, budgets: Budgets, hold: AdmissionHold, who_waits_for_whom: Callable[[], str]) -> None:
        """``who_waits_for_whom`` returns the text for Stalled."""
        self._budgets = budgets
        self._hold = hold
        self._who_waits_for_whom = who_waits_for_whom
        self._last_move = self._waiting_since = 0.0
        self._was_held = self._allows_silence = self._is_paused = False
        self._wait: Deadline | None = None
        self._ended_by: AsyncRLError | None = None
        hold.notify(self._hold_changed)

    def moved(self) -> None:
        """Record that a token arrived, a group ended, or an episode asked an engine after its tools."""
        self._last_move = loop_time()

    async def wait(self, event: asyncio.Event, *, allows_silence: bool = False) -> None:
        """Wait for ``event``.  Raises Stalled or RewardOutage, with the text at that moment, or the error of ``end``.

        With ``allows_silence``, only an outage ends the wait.  One wait at a time.
        """
        self._waiting_since, self._allows_silence = loop_time(), allows_silence
        while not event.is_set():
            if self._ended_by is not None and not allows_silence:
                raise self._ended_by
            heard = self._last_move
            self._wait = Deadline(self._ends_at() - loop_time())
            try:
                async with self._wait:
                    await event.wait()
            except TimeoutError:
                if event.is_set() or self._last_move > heard or self._is_ended or self._ends_at() > loop_time():
                    continue
                raise self._error() from None
            finally:
                self._wait = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Allow silence during the block, in which nothing can move; its time does not count."""
        self._change_pause(True)
        try:
            yield
        finally:
            self._change_pause(False)

    def end(self, error: AsyncRLError) -> None:
        """Let every wait for groups raise ``error`` from now on, because no further group will come."""
        self._ended_by = error
        if self._wait is not None:
            self._wait.give(0.0)

    @property
    def _is_ended(self) -> bool:
        """Whether the present wait is one for groups, and no further group will come."""
        return self._ended_by is not None and not self._allows_silence

    def _ends_at(self) -> float:
        if self._is_ended:
            return loop_time()
        if (since := self._hold.since) is not None:
            return since + self._budgets.reward_outage_s
        if self._allows_silence or self._is_paused:
            return loop_time() + _FOREVER_S
        ends_at = max(self._waiting_since, self._last_move) + self._budgets.watchdog_timeout_s
        return min(ends_at, loop_time() + _FOREVER_S)

    def _error(self) -> RewardOutage | Stalled:
        if self._hold.since is not None:
            return RewardOutage(
                f"{self._hold.reason}; the limit is {self._budgets.reward_outage_s:g} s (reward-outage-s)"
            )
        limit = self._budgets.watchdog_timeout_s
        return Stalled(f"no token and no group for {limit:g} s (watchdog-timeout-s): {self._who_waits_for_whom()}")

    def _hold_changed(self) -> None:
        is_held = self._hold.since is not None
        if is_held is self._was_held:
            return
        self._was_held = is_held
        self._begin_anew()  # the time of the outage does not count as silence

    def _change_pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.moved()
        if self._wait is not None:
            self._wait.give(self._ends_at() - loop_time())
