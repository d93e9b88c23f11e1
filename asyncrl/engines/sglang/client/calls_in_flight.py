"""The requests in flight on the servers, kept so that they can be interrupted together.  Sends nothing."""

import asyncio
from types import TracebackType

from asyncrl.errors import EngineLost


class CallInFlight:
    """One call of ``generate``.  ``async with``: the block raises EngineLost when ``fail`` ends it."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.is_interrupted = False
        """Whether we asked the servers to abort the call; any other abort counts as a lost request."""
        self._deadline: asyncio.Timeout | None = None

    async def __aenter__(self) -> None:
        self._deadline = await asyncio.timeout(None).__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            try:
                await deadline.__aexit__(kind, error, trace)
            except TimeoutError as late:
                raise EngineLost(f"{self.rid} was not aborted in time") from late

    def fail(self) -> None:
        """End the block with EngineLost.  No-op if the block has ended."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class CallsInFlight:
    """All calls of ``generate`` in one engine client."""

    def __init__(self) -> None:
        # Invariant: only the event loop's thread uses this object, and no method awaits between changing the calls and
        # ``_empty``.  Otherwise ``until_none`` could return while a call is in flight.
        self._calls_in_flight: dict[str, CallInFlight] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self, rid: str) -> CallInFlight:
        """Register a call; the caller must ``end`` it."""
        call = self._calls_in_flight[rid] = CallInFlight(rid)
        self._empty.clear()
        return call

    def end(self, call: CallInFlight) -> None:
        """Remove a call that is over, successful or not."""
        del self._calls_in_flight[call.rid]
        if not self._calls_in_flight:
            self._empty.set()

    def now(self) -> tuple[CallInFlight, ...]:
        """Return a copy of the calls in flight."""
        return tuple(self._calls_in_flight.values())

    def fail_all(self) -> int:
        """End every call with EngineLost; return their number."""
        for call in self._calls_in_flight.values():
            call.fail()
        return len(self._calls_in_flight)

    def are_none(self) -> bool:
        """Return whether no call is in flight."""
        return self._empty.is_set()

    async def until_none(self) -> None:
        """Return once no call is in flight."""
        await self._empty.wait()
