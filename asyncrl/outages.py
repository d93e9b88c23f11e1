"""Outages of services that rewards need: the errors that show one, and the circuit breaker that waits it out.

closed ──FAILURES failed calls in a row──▶ open ──a pause──▶ half-open: one call probes ──it is answered──▶ closed
                                            ▲                       └──it fails──┘

waits for     one of the repeated calls to be answered; a pause before each probe
unblocked by  the first answer, also of a call that was in flight when the breaker opened
on cancel     a cancelled probe hands its place to the next waiting call
"""

import asyncio
import errno
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncrl.errors import RewardFailed, RewardUnavailable
from asyncrl.event_loop import loop_time

if TYPE_CHECKING:  # a reward's worker imports this module before its first answer, so it imports little
    from asyncrl.protocols import AdmissionHold

logger = logging.getLogger(__name__)

MOST_ATTEMPTS = 10
"""Attempts at one answer, at most; slime's number.  Attempts without a connection do not count during an outage."""
FAILURES = 3
"""Failed calls in a row, over all answers, that open the breaker."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before an attempt, in seconds, without jitter."""
QUOTED = 300
"""Characters of an error that a message quotes, at most."""
OUTAGE_S = 1800.0
"""Default of ``--reward-outage-s``: a service that restarts, or whose machine does, is back by then."""

_UNREACHED = frozenset(
    {
        ("builtins", "ConnectionRefusedError"),
        ("socket", "gaierror"),
        ("aiohttp", "ClientConnectorError"),
        ("aiohttp", "ConnectionTimeoutError"),
        ("httpx", "ConnectError"),
        ("httpx", "ConnectTimeout"),
        ("requests", "ConnectTimeout"),
        ("urllib3", "NewConnectionError"),
        ("urllib3", "ConnectTimeoutError"),
    }
)
"""Package and name of exceptions that say that there was no connection."""
_INTERRUPTED = frozenset(
    {
        ("builtins", "ConnectionError"),
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("httpx", "TransportError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("urllib3", "MaxRetryError"),
        ("urllib3", "ProtocolError"),
        ("urllib3", "TimeoutError"),
        ("openai", "APIConnectionError"),
    }
)
"""Package and name of exceptions that say that a connection broke or was silent, with all their subclasses.

A plain TimeoutError is not one of them: it does not say what was slow.
"""
_NO_NETWORK = frozenset(
    {
        errno.EHOSTUNREACH,
        errno.EHOSTDOWN,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EADDRNOTAVAIL,
        errno.ETIMEDOUT,  # the kernel's, of a connection; a deadline of Python's has no number
    }
)
_BUSY = frozenset({408, 429, 502, 503, 504})
"""HTTP statuses that another attempt may not meet."""


def reached_by(error: BaseException) -> bool | None:
    """Return whether a user's exception came from a service that was reached; None if it is about no connection.

    A plain ``ConnectionError`` counts as not reached.  Classes are compared by package and name, because the libraries
    may not be installed here.
    """
    try:
        return _reached_by(error)
    except Exception:  # noqa: BLE001 (a user's exception may have properties that raise, or contain itself)
        return None


def _reached_by(error: BaseException) -> bool | None:
    if isinstance(error, BaseExceptionGroup):  # of a function's TaskGroup
        found = [_reached_by(each) for each in error.exceptions]
        return None if None in found else any(found)
    names = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__}
    if (inner := _inner(error, names)) is not None:
        return _reached_by(inner)
    if type(error) is ConnectionError or names & _UNREACHED or getattr(error, "errno", None) in _NO_NETWORK:
        return False
    return True if names & _INTERRUPTED or _status(error) in _BUSY else None


def _inner(error: BaseException, names: set[tuple[str, str]]) -> BaseException | None:
    """Return the exception that the error of a library wraps: of urllib and urllib3, requests, or tenacity."""
    wrapped = getattr(error, "reason", None)
    if ("requests", "ConnectionError") in names and error.args:
        wrapped = error.args[0]
    if ("tenacity", "RetryError") in names:
        wrapped = error.__cause__
    return wrapped if isinstance(wrapped, BaseException) else None


def _status(error: BaseException) -> object:
    """Return the HTTP status that an exception carries, in the places of aiohttp, urllib, openai, httpx, requests."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "code", "status_code"):
            if isinstance(found := getattr(holder, name, None), int):
                return found
    return None


class CircuitBreaker:
    """The calls to one service, with the record of their successes.  Not thread-safe."""

    def __init__(self, name: str, *, limit_s: float = OUTAGE_S, holds_groups: bool = False) -> None:
        """``name``: the service in messages.  ``limit_s``: 0 never opens the breaker.

        With ``holds_groups``, calls wait for as long as it takes, because the scheduler ends the run after ``limit_s``.
        Otherwise calls fail once an outage has lasted ``limit_s``.
        """
        self._name = name
        self._limit_s = limit_s
        self.holds_groups = holds_groups
        """Whether no new group starts during an outage."""
        self._failures = 0
        self._since: float | None = None
        self._last_error = ""
        self._closed = asyncio.Event()
        self._closed.set()
        self._has_given_up = False
        self._probing = asyncio.Lock()
        self._num_probes = 0
        self._num_waiting = 0
        self._past_s = 0.0
        self._changed: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether every call failed lately, so that calls wait for a probe."""
        return not self._closed.is_set()

    @property
    def since(self) -> float | None:
        """Time of the outage's first failure on the event loop's clock; None unless calls wait for its end."""
        return self._since if self.is_open and self._num_waiting else None

    @property
    def reason(self) -> str | None:
        """A line on who waits for whom, while every call fails and answers wait; None otherwise."""
        if (since := self.since) is None:
            return None
        return (
            f"every call to {self._name} has failed for {loop_time() - since:.0f} s (last: "
            f"{self._last_error}); {self._num_waiting} answers wait for it"
            f"{', and no new group starts' if self.holds_groups else ''}"
        )

    @property
    def outage_s(self) -> float:
        """Seconds of all outages so far, in which calls waited."""
        return self._past_s + (0.0 if (since := self.since) is None else loop_time() - since)

    def notify(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever ``reason`` may have changed."""
        self._changed.append(changed)

    async def call[T](self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``attempt``, which is repeated after RewardUnavailable.  Raises RewardFailed.

        An attempt that raises anything else was answered.  It limits its own time.  One whose function was silent for
        all of it fails at once and says nothing about the service: some answers alone make a function hang.
        """
        counted = failures = 0
        self._num_waiting += 1
        try:
            while True:
                try:
                    return await self._tried(attempt, failures)
                except RewardUnavailable as error:
                    failures += 1
                    counted += error.reached or not self.is_open
                    if counted >= MOST_ATTEMPTS or self._has_given_up or error.is_late:
                        text = f"{failures} attempts, the last: {error}" if failures > 1 else str(error)
                        raise RewardFailed(text) from error
        finally:
            if self.is_open and self._num_waiting == 1:
                self._close()  # no call is left to probe; the next failures open it again
                self._failures, self._since = 0, None
            self._num_waiting -= 1
            if self.is_open:
                self._tell()

    async def _tried[T](self, attempt: Callable[[], Awaitable[T]], failures: int) -> T:
        if failures and not self.is_open:
            await asyncio.sleep(_pause_s(failures))
        if not self.is_open:
            return await self._recorded(attempt)
        self._tell()
        async with self._probing:  # half-open: one call at a time
            with suppress(TimeoutError):
                async with asyncio.timeout(_pause_s(self._num_probes + 1)):
                    await self._closed.wait()
            if self.is_open:
                self._num_probes += 1
                return await self._recorded(attempt)
        return await self._recorded(attempt)

    async def _recorded[T](self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            value = await attempt()
        except RewardUnavailable as error:
            if not error.is_late:
                self._failed(error)
            raise
        except Exception:  # not a cancellation
            self._answered()
            raise
        self._answered()
        return value

    def _failed(self, error: RewardUnavailable) -> None:
        self._failures += 1
        self._last_error = " ".join(str(error).split())[:QUOTED]
        now = loop_time()
        if self._since is None:
            self._since = now
        if self.is_open and not self.holds_groups and now - self._since >= self._limit_s:
            logger.warning("%s; answers that wait for it fail (reward-outage-s)", self.reason)
            self._has_given_up = True
            self._close()
        elif self._failures >= FAILURES and not self.is_open and self._limit_s > 0 and not self._has_given_up:
            self._closed.clear()
            self._num_probes = 0
            logger.warning("%s; one call at a time is repeated until one is answered", self.reason)
            self._tell()

    def _answered(self) -> None:
        if self._since is None:  # the usual case costs nothing
            return
        if self.is_open:
            ends = "; groups start again" if self.holds_groups else ""
            logger.warning("%s answers again after %.0f s%s", self._name, loop_time() - self._since, ends)
            self._close()
        self._failures, self._since, self._has_given_up = 0, None, False

    def _close(self) -> None:
        self._past_s = self.outage_s
        self._closed.set()
        self._tell()

    def _tell(self) -> None:
        for changed in self._changed:
            changed()


class Holds:
    """Several holds of admission as one."""

    def __init__(self, holds: "Iterable[AdmissionHold]") -> None:
        self._holds = tuple(holds)

    @property
    def reason(self) -> str | None:
        """The reason of the first hold that has one."""
        return next((reason for each in self._holds if (reason := each.reason)), None)

    @property
    def since(self) -> float | None:
        """The start of the longest present hold."""
        return min((since for each in self._holds if (since := each.since) is not None), default=None)

    @property
    def outage_s(self) -> float:
        """Seconds of all holds so far, summed."""
        return sum(each.outage_s for each in self._holds)

    def notify(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever ``reason`` may have changed."""
        for each in self._holds:
            each.notify(changed)


def _pause_s(failures: int) -> float:
    return min(2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S) + random.random()
