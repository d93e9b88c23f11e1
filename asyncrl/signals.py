"""SIGINT and SIGTERM: the first one ends the run in an orderly way, whenever it comes; the others change nothing."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A signal came while no event loop was running.  Like KeyboardInterrupt, not for ``except Exception``."""


class Signals:
    """SIGINT and SIGTERM end the run once, in an orderly way; those that follow change nothing."""

    CAUGHT = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first one, if any."""

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator["Signals"]:
        """Catch both for the body."""
        signals = cls()
        before = {number: signal.getsignal(number) for number in cls.CAUGHT}
        signals.catch()
        try:
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

    def catch(self) -> None:
        """Raise Interrupted in the main thread at the first signal.  To be called while no event loop runs."""
        for number in self.CAUGHT:
            signal.signal(number, self._raise)

    def only_remember(self) -> None:
        """From now on a signal is remembered and interrupts nothing: what is being ended must end."""
        for number in self.CAUGHT:
            signal.signal(number, self._remember)

    def cancel_running_task(self) -> None:
        """Cancel the calling task at the first signal, for as long as its event loop runs."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in self.CAUGHT:
            loop.add_signal_handler(number, self._cancel, number, task)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._first(number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self._first(number):
            raise Interrupted

    def _cancel(self, number: int, task: "asyncio.Task[None] | None") -> None:
        if self._first(number) and task is not None:
            task.cancel()

    def _first(self, number: int) -> bool:
        first = self.received is None
        self.received = self.received or signal.Signals(number)
        return first
