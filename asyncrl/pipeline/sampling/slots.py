"""Slots: each is the right to have one sample on the engines.  Timelines show samples by slot number."""

import asyncio
from collections.abc import Callable

from asyncrl.event_loop import loop_time
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad


class Slots:
    """``size`` slots, of which at most ``limit`` are held at once.  The lowest free number is taken first.

    A sample has a *claim* from its group's admission until it is generated or given up, whether or not it holds a slot
    yet.  Admission counts claims, so it never starts a group that would only queue.  An episode has a claim as well,
    which ``load`` weighs with the slots that it is expected to hold.
    """

    def __init__(self, size: int, load: EpisodeLoad | None = None) -> None:
        """``load`` is None if every sample is a single turn, and so holds its slot until it is generated."""
        self.size = size
        self.load = load
        self.limit = size
        self._claimed = 0
        self._withheld: list[int] = []
        self._free: asyncio.PriorityQueue[int] = asyncio.PriorityQueue()
        for number in range(size):
            self._free.put_nowait(number)
        self._on_unclaim: Callable[[], None] = lambda: None
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def notify(self, on_unclaim: Callable[[], None]) -> None:
        """Call ``on_unclaim`` whenever claims are given up or the limit changes."""
        self._on_unclaim = on_unclaim

    @property
    def in_use(self) -> int:
        """Number of slots held now."""
        return self.size - self._free.qsize() - len(self._withheld)

    @property
    def free(self) -> int:
        """Number of slots within the limit that no sample claims, at least 0."""
        return max(0, self.limit - self._claimed) if self.load is None else self.load.free(self.limit, self._claimed)

    @property
    def claimed(self) -> int:
        """Number of claims."""
        return self._claimed

    def has_room(self, num_samples: int) -> bool:
        """Return whether the limit on open episodes lets this many more start."""
        return self.load is None or self.load.has_room(num_samples)

    def set_limit(self, limit: int) -> None:
        """Hold at most ``limit`` slots (1 to ``size``) at once.  Slots above it are withheld as they are given back.

        Raises ValueError if ``limit`` is out of range.
        """
        if not 1 <= limit <= self.size:
            raise ValueError(f"limit must be 1 to {self.size}, got {limit}")
        self.limit = limit
        self._balance()
        self._on_unclaim()

    def claim(self, num_samples: int) -> None:
        """Claim slots for samples that will ask for one."""
        self._claimed += num_samples

    def unclaim(self, num_samples: int) -> None:
        """Give up the claims of samples that no longer need a slot."""
        if num_samples > self._claimed:
            raise AssertionError(f"{num_samples} claims given up, {self._claimed} were made")
        self._claimed -= num_samples
        self._on_unclaim()

    def hold(self) -> "_Held":
        """Return an ``async with`` context that waits for a slot, yields its number, and gives it back at the end."""
        return _Held(self)

    async def acquire(self) -> int:
        """Wait for a slot and return its number; the caller must call ``release``."""
        number = await self._free.get() if self._free.empty() else self._free.get_nowait()
        if self._idle_since is not None:
            self._close_idle(loop_time())
        return number

    def release(self, number: int) -> None:
        """Return a slot."""
        self._free.put_nowait(number)
        self._balance()
        if self.in_use == 0:
            self._idle_since = loop_time()

    def take_idle_s(self) -> float:
        """Return the seconds with no slot in use since the last call; 0 before the first slot is taken."""
        now = loop_time()
        was_idle = self._idle_since is not None
        self._close_idle(now)
        if was_idle:
            self._idle_since = now
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def _balance(self) -> None:
        """Withhold free slots above the limit, and release withheld ones below it."""
        while len(self._withheld) < self.size - self.limit and not self._free.empty():
            self._withheld.append(self._free.get_nowait())
        while len(self._withheld) > self.size - self.limit:
            self._free.put_nowait(self._withheld.pop())

    def _close_idle(self, now: float) -> None:
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None


class _Held:
    """A held slot.  A class takes 3 microseconds per sample, an ``asynccontextmanager`` 6."""

    __slots__ = ("_number", "_slots")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._number = -1

    async def __aenter__(self) -> int:
        self._number = await self._slots.acquire()
        return self._number

    async def __aexit__(self, *failure: object) -> None:
        self._slots.release(self._number)
