"""Work in a thread that leaves the GIL to the event loop."""

import time
from collections.abc import Callable, Iterable, Iterator

WORK_S, PAUSE_S = 0.0005, 0.0001
"""Seconds of work with the GIL, and of the pause that follows; the system adds 0.05 ms to a pause."""


def unhurried[T](
    values: Iterable[T], clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
) -> Iterator[T]:
    """Yield the values, with a pause in which another thread gets the GIL after each ``WORK_S`` of work."""
    # Invariant: this thread must sleep.  If it only releases the GIL for a moment, as pyarrow's and numpy's calls do,
    # it takes the GIL back before the loop's thread has woken up.  Each release also restarts the 5 ms after which a
    # waiting thread demands the GIL (take_gil in CPython 3.12): the loop waited for whole columns, 30 ms and more.
    since = clock()
    for each in values:
        yield each
        if clock() - since > WORK_S:
            sleep(PAUSE_S)
            since = clock()
