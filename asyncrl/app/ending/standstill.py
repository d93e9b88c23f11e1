"""A thread that notices when the event loop stands still, and ends a program whose loop does not move again.

The watchdog of a run is a task of the loop.  A user function that never returns stops it together with everything else.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncrl.app.ending.leaving import ENDING_S, end_now, stack_line
from asyncrl.daemon_threads import in_daemon_thread

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Seconds between two looks.  Looks are counted, not seconds: a program that was suspended has not stood still."""
WARN_S = 10.0
"""Seconds after which a warning says where the loop stands still."""


@contextmanager
def standstill_watch(limit_s: float, signal_code: Callable[[], int | None]) -> Iterator[None]:
    """Watch the running loop during the block; end the program once it has stood still for ``limit_s``.

    After a signal, for which ``signal_code`` returns the exit code, the limit is ENDING_S at most.
    """
    watch, is_over = _Watch(asyncio.get_running_loop(), limit_s, signal_code), threading.Event()
    threading.Thread(target=watch.run, args=(is_over,), name="standstill-watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, signal_code: Callable[[], int | None]) -> None:
        self._loop = loop
        self._limit_s = limit_s
        self._signal_code = signal_code
        # Invariant: the loop's thread sets the event, and this thread alone clears it.
        self._answer = threading.Event()
        self._still_s = 0.0

    def run(self, is_over: threading.Event) -> None:
        """Look every TICK_S until ``is_over``."""
        try:
            self._loop.call_soon_threadsafe(self._answer.set)
            while not is_over.wait(TICK_S):
                if self._answer.is_set():
                    self._still_s = 0.0
                    self._answer.clear()
                    self._loop.call_soon_threadsafe(self._answer.set)
                else:
                    self._count()
        except RuntimeError:  # the loop is closed
            return

    def _count(self) -> None:
        before, self._still_s = self._still_s, self._still_s + TICK_S
        if before < WARN_S <= self._still_s:
            text = f"the event loop has stood still for {self._still_s:g} s, in {stack_line()}"
            in_daemon_thread(lambda: logger.warning(text), "standstill-warning")  # a hung disk may hold logging's lock
        code = self._signal_code()
        if code is not None and self._still_s >= min(self._limit_s, ENDING_S):
            end_now(code, f"warning: the event loop stood still for {self._still_s:g} s, in {stack_line()}")
        if self._still_s >= self._limit_s:
            line = f"the event loop stood still for {self._still_s:g} s (watchdog-timeout-s), in {stack_line()}"
            end_now(1, f"error: Stalled: {line}")
