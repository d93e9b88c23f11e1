"""The requests that are on the servers now, so that they can be interrupted together.  Posts nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from asyncrl.errors import EngineLost


class Flight:
    """One call of ``generate``."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.is_interrupted = False
        """Whether we asked the servers to end it; an abort that nobody asked for is a loss."""
        self._deadline: asyncio.Timeout | None = None

    @contextlib.asynccontextmanager
    async def until_given_up(self) -> AsyncIterator[None]:
        """The block may be ended by ``give_up``.  Raises EngineLost then."""
        self._deadline = deadline = asyncio.timeout(None)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if deadline.expired():
                raise EngineLost(f"{self.rid} was not aborted in time") from error
            raise
        finally:
            self._deadline = None

    def give_up(self) -> None:
        """End the block with EngineLost, if it has not ended."""
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class Flights:
    """All calls of ``generate`` of one engine client."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.contextmanager
    def one(self, rid: str) -> Iterator[Flight]:
        """A call that lasts as long as the block."""
        flight = self._flights[rid] = Flight(rid)
        self._empty.clear()
        try:
            yield flight
        finally:
            del self._flights[rid]
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
