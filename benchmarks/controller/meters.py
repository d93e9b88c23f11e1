"""Meters of a process: lag of its event loop, pauses of its garbage collector, shares of its CPU time."""

import contextlib
import cProfile
import gc
import pstats
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.metrics.loop_lag import LoopLag

LAG_PERIOD_S = 0.005
"""Seconds between two measurements of the loop's lag: a quarter of the 20 ms that the benchmark must resolve."""

_ROOMS = (
    ("orjson", "json"),
    ("engines/sglang/client/http.py", "http"),
    ("engines/sglang/client/events.py", "http"),
    ("engines/sglang", "client"),
    ("aiohttp", "http"),
    ("yarl", "http"),
    ("multidict", "http"),
    ("pipeline/sampling/partial_sample.py", "draft"),
    ("asyncrl/types.py", "draft"),
    ("asyncrl/pipeline", "scheduler"),
    ("asyncrl/buffer", "scheduler"),
    ("asyncrl/metrics", "metrics"),
    ("asyncrl/data", "text"),
    ("tokenizers", "text"),
    ("asyncio", "asyncio"),
)
"""Part of a function's file name, or of the library of a built-in function, and the share that its time is added to.

The first match counts.  Other functions' time is added to their callers'.  Time without any such caller is the loop
itself: uvloop, sockets, and aiohttp's parser, which is compiled.
"""
LOOP = "loop and sockets"


class AllLags(LoopLag):
    """A LoopLag that keeps every delay."""

    def __init__(self) -> None:
        super().__init__()
        self.late_s: list[float] = []

    def observe(self, late_s: float) -> None:
        """See ``LoopLag``."""
        super().observe(late_s)
        self.late_s.append(max(0.0, late_s))


def percentiles_ms(late_s: Sequence[float], period_s: float = LAG_PERIOD_S) -> tuple[float, float, float]:
    """p50, p99 and maximum of the lag that an event due at a random moment meets, in milliseconds.

    One late measurement stands for all measurements that were due meanwhile.  Otherwise a loop that is blocked
    for a second in every ten would seem to be on time in all but one measurement of two thousand.
    """
    met = sorted(lag - missed * period_s for lag in late_s for missed in range(1 + int(lag / period_s)))
    if not met:
        raise ValueError("late_s must have at least one entry")
    return tuple(1000 * met[min(len(met) - 1, int(share * len(met)))] for share in (0.5, 0.99, 1.0))  # type: ignore[return-value]


class GcPauses:
    """Seconds of each run of the garbage collector, while watched."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the garbage collector within the ``with`` block."""
        gc.callbacks.append(self._note)
        try:
            yield
        finally:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds.append(time.thread_time() - self._began)


def starved_s() -> float:
    """Seconds so far in which this thread was ready to run and had no CPU; 0 if the system does not report it."""
    file = Path("/proc/thread-self/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def shares(profile: cProfile.Profile) -> dict[str, float]:
    """Shares of the profiled time by package, largest first."""
    spent: Counter[str] = Counter()
    for place, (_, _, own_s, _, callers) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        room = _room(place)
        if room is not None:
            spent[room] += own_s
        else:
            for caller, (_, _, own_for_caller_s, _) in callers.items():
                spent[_room(caller) or LOOP] += own_for_caller_s
            if not callers:
                spent[LOOP] += own_s
    total = sum(spent.values())
    return {room: own_s / total for room, own_s in spent.most_common()}


def _room(place: tuple[str, int, str]) -> str | None:
    name = f"{place[0]} {place[2]}" if place[0] == "~" else place[0]
    return next((room for part, room in _ROOMS if part in name), None)
