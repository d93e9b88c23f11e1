"""SIGINT and SIGTERM: the first one ends the run in an orderly way, whenever it comes; the others change nothing.

    nothing was started yet        the program leaves at once
    Ray starts, or is being ended  remembered
    the event loop runs            the run's task is cancelled

No handler raises: an exception out of nowhere may leave a lock taken (of logging, of an import), and the ending waits
for it for ever.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Signals:
    """What the first SIGINT or SIGTERM does, as the run goes on."""

    CAUGHT = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first one, if any."""
        self._first: Callable[[], None] = self._leave

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator["Signals"]:
        """Catch both for the body, which they leave at once until ``remember`` is called."""
        signals = cls()
        before = {number: signal.getsignal(number) for number in cls.CAUGHT}
        try:
            signals.hold()
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """By the shells' convention."""
        if self.received is None:
            raise AssertionError("no signal came")
        return 128 + self.received

    def remember(self) -> None:
        """From now on there are things to end: a signal is remembered until ``cancelling`` takes it up."""
        self._first = _nothing

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Cancel the calling task at the first signal, or now if one came before, for as long as the body runs."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise AssertionError("called from a task")
        self._first = lambda: _cancel(loop, task)
        try:
            if self.received is not None:
                task.cancel()
            yield
        finally:
            self.remember()

    def hold(self) -> None:
        """Put the handlers in place: at the start, and again where a library put its own there."""
        for number in self.CAUGHT:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Invariant: takes no lock and logs nothing.  It runs in the main thread between any two instructions, perhaps
        # while that thread holds the very lock.
        if self.received is None:
            self.received = signal.Signals(number)
            self._first()

    def _leave(self) -> None:
        os._exit(self.exit_code)


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    loop.call_soon_threadsafe(task.cancel)  # a handler runs between any two instructions


def _nothing() -> None:
    pass
