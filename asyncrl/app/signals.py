"""SIGINT and SIGTERM: the first signal ends the run in an orderly way, and a later Ctrl-C ends the program at once.

    state of the program           effect of the first signal
    nothing was started yet        the program exits at once
    Ray is starting or stopping    the signal is remembered
    the event loop is running      the run's task is cancelled; after SIGTERM it may get a grace first, to save

A SIGINT that follows the first signal after AGAIN_S or more kills every process of the run and ends the program.  A
further SIGTERM has no effect: schedulers send several before SIGKILL, and the orderly end needs the time between them.

From the moment when processes may have been started, SIGHUP is ignored, by this program and by all that it starts.  The
kernel sends it to all of them when their terminal goes, as at the end of an SSH connection.

No handler raises.  An exception between two arbitrary instructions could leave a lock held, of logging or of an import,
and the shutdown would deadlock on it.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from asyncrl.app.ending.leaving import end_now

AGAIN_S = 1.0
"""Seconds after the first signal from which a SIGINT is a second Ctrl-C.

A terminal sends the first one to the program and to the script that started it, which passes it on.
"""


class Signals:
    """The handler of SIGINT and SIGTERM, whose action changes during the run."""

    CAUGHT = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal received, if any."""
        self._received_at = 0.0
        self._first: Callable[[], None] = self._leave
        self._is_done: Callable[[], bool] = lambda: False

    @classmethod
    @contextmanager
    def caught(cls) -> Iterator["Signals"]:
        """Handle both signals during the body; until ``remember`` is called, a signal exits the program at once."""
        signals = cls()
        before = {number: signal.getsignal(number) for number in (*cls.CAUGHT, signal.SIGHUP)}
        try:
            signals.hold()
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """Exit code by the shells' convention: 128 plus the signal's number; 0 if the signal has cost nothing."""
        if self.received is None:
            raise AssertionError("no signal came")
        return 0 if self._is_done() else 128 + self.received

    def cost_nothing_once(self, is_done: Callable[[], bool]) -> None:
        """Leave the exit code 0 if ``is_done`` returns True: only the clean-up was left to interrupt.

        A handler may call ``is_done``, so it takes no lock.
        """
        self._is_done = is_done

    def code_if_received(self) -> int | None:
        """Return ``exit_code``, or None if no signal came."""
        return None if self.received is None else self.exit_code

    def remember(self) -> None:
        """Only record a signal from now on, because processes may have been started; ``cancelling`` acts on it."""
        # Ignored, not handled: children inherit it, and the end of Ray's raylet, which is among them, ends the run.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._first = _nothing

    @contextmanager
    def cancelling(self, ends_early: Callable[[], bool] = lambda: False, grace_s: float = 0.0) -> Iterator[None]:
        """Cancel the calling task at the first signal during the body, or at once if one was received before.

        After SIGTERM, if ``ends_early`` returns True, the task ends by itself and is cancelled only after ``grace_s``
        seconds.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise AssertionError("called from a task")

        timers = list[asyncio.TimerHandle]()

        def end() -> None:
            if self.received == signal.SIGTERM and ends_early():
                timers.append(loop.call_later(grace_s, task.cancel))
            else:
                task.cancel()

        self._first = lambda: _soon(loop, end)
        try:
            if self.received is not None:
                task.cancel()
            yield
        finally:
            self.remember()
            for timer in timers:  # the task has ended by itself
                timer.cancel()

    def hold(self) -> None:
        """Install the handlers: at the start, and again after a library has installed others."""
        for number in self.CAUGHT:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Invariant: takes no lock and logs nothing.  It runs in the main thread between any two instructions, so that
        # thread may already hold the lock.
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            self._first()
        elif number == signal.SIGINT and time.monotonic() >= self._received_at + AGAIN_S:
            line = "SIGINT again: the program ends at once, without its orderly end, and kills its processes"
            end_now(self.exit_code, f"warning: {line}")

    def _leave(self) -> None:
        os._exit(self.exit_code)


def _soon(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(act)  # thread-safe call: a handler runs between any two instructions


def _nothing() -> None:
    pass
