"""The requests that are on the servers now, so that they can be interrupted together.  Posts nothing."""

import asyncio
from types import TracebackType

from asyncrl.errors import EngineLost


class Flight:
    """One call of ``generate``.  ``async with``: ``give_up`` may end the block, which then raises EngineLost."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.is_interrupted = False
        """Whether we asked the servers to end it; an abort that nobody asked for is a loss."""
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

    def give_up(self) -> None:
        """End the block with EngineLost, if it has not ended."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class Flights:
    """All calls of ``generate`` of one engine client."""

    def __init__(self) -> None:
        # Invariant: only the event loop's thread comes here, and no method waits between changing the calls and
        # ``_empty``, so the two always agree.
        self._flights: dict[str, Flight] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self, rid: str) -> Flight:
        """A call; ``end`` must follow."""
        flight = self._flights[rid] = Flight(rid)
        self._empty.clear()
        return flight

    def end(self, flight: Flight) -> None:
        """It is over, however it went."""
        del self._flights[flight.rid]
        if not self._flights:
            self._empty.set()

    def now(self) -> tuple[Flight, ...]:
        """Those in flight."""
        return tuple(self._flights.values())

    def give_up(self) -> int:
        """End every call with EngineLost; how many there were."""
        for flight in self._flights.values():
            flight.give_up()
        return len(self._flights)

    async def until_none(self) -> None:
        """Return once no call is in flight."""
        await self._empty.wait()
