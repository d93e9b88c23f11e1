"""SIGINT and SIGTERM: the first one ends the run in an orderly way, whenever it comes; the others change nothing."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
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
        self._noted: tuple[socket.socket, socket.socket] | None = None

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator["Signals"]:
        """Catch both for the body."""
        signals = cls()
        before = {number: signal.getsignal(number) for number in cls.CAUGHT}
        signals._note()
        try:
            signals._set(signals._raise)
            yield signals
        finally:
            signals._stop_noting()
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """By the shells' convention."""
        if self.received is None:
            raise AssertionError("no signal came")
        return 128 + self.received

    def catch(self) -> None:
        """Raise Interrupted in the main thread at the first signal, or now if one came since ``caught`` began.

        To be called while no event loop runs.  What a handler raises can be lost on the way (in a destructor or a
        callback), and a library can put a handler of its own in place for a while; the kernel's notes are not lost.
        """
        self._set(self._raise)
        for number in self._stop_noting():
            self._first(number)
        if self.received is not None:
            raise Interrupted

    def only_remember(self) -> None:
        """From now on a signal is remembered and interrupts nothing: what is being ended must end."""
        self._set(self._remember)

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

    def _set(self, handler: Callable[[int, FrameType | None], None]) -> None:
        for number in self.CAUGHT:
            signal.signal(number, handler)

    def _note(self) -> None:
        """Have every signal written down, whatever its handler does."""
        self._noted = socket.socketpair()
        for end in self._noted:
            end.setblocking(False)
        signal.set_wakeup_fd(self._noted[1].fileno(), warn_on_full_buffer=False)

    def _stop_noting(self) -> list[int]:
        """The signals noted so far that are ours."""
        if self._noted is None:
            return []
        signal.set_wakeup_fd(-1)
        reader, writer = self._noted
        self._noted = None
        with reader, writer:
            try:
                noted = list(reader.recv(4096))
            except BlockingIOError:
                return []
        return [number for number in noted if number in self.CAUGHT]
