"""The end of the program when its orderly end does not come: at once, or after a time limit.

    a second Ctrl-C                                end_now
    the run is over, its clean-up is not           EndTimer, after ENDING_S
    main has returned, the interpreter stays       leave, after LEAVE_S; at once if threads of user code still run

All three kill every process below this one and print one line.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NoReturn, Self

from asyncrl.blocking_calls import UserCalls
from asyncrl.engines.cluster.session import kill_descendants
from asyncrl.errors import AsyncRLError, ConfigError, first_line

ENDING_S = 300.0
"""Seconds from the end of a run to that of the program: processes, Ray and trackers, which get 120 s to send rows."""
LEAVE_S = 5.0
"""Seconds for the interpreter to exit after ``main``."""
JOIN_S = 0.5
"""Seconds for threads that are about to end."""
_SHOW_CURSOR = "\x1b[?25h"
"""Control sequence for a terminal whose cursor the live view has hidden."""


def end_now(code: int, line: str) -> NoReturn:
    """Print ``line``, kill every process below this one and end the program without any further clean-up.

    A signal handler or any thread may call it.
    """
    # Invariant: takes no lock.  The interrupted code may hold those of ``print``, of logging or of an import.
    prefix = _SHOW_CURSOR if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{prefix}{line}\n".encode())
    kill_descendants()
    os._exit(code)


def leave(code: int) -> NoReturn:
    """Exit the interpreter with ``code``, within LEAVE_S.  ``main`` has returned.

    Python joins every thread that is no daemon.  Threads that user code left would keep the program for ever, so the
    program ends without them.
    """
    left = _user_threads()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if left:
        end_now(code, f"warning: the program ends without threads of user code that still run: {', '.join(left)}")
    _after(LEAVE_S, code, f"warning: the interpreter did not exit within {LEAVE_S:g} s; the program ends at once")
    sys.exit(code)


class EndTimer:
    """Ends the program if its clean-up takes too long.  ``with`` around the run: its end starts the time limit.

    The program ends with the line and the exit code of the run's error, or with the signal's code if a signal ended
    the run, early or not (``Signals.exit_code``); else with 0.
    """

    def __init__(self, signal_code: Callable[[], int | None], seconds: float = ENDING_S) -> None:
        """``signal_code`` returns the exit code if a signal ended the run."""
        self._signal_code = signal_code
        self._seconds = seconds
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.has_ended_well = False
        """Whether the run has ended without an error, after its last step or early."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:  # an inner block has started it otherwise, with the first error
            self.has_ended_well = error is None
            self._thread = threading.Thread(target=self._wait, args=(error,), name="end-timer", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """Stop the time limit: the clean-up is over."""
        self._is_over.set()

    def _wait(self, error: BaseException | None) -> None:
        if self._is_over.wait(self._seconds):
            return
        late = f"the program did not end within {self._seconds:g} s of its run; it ends at once, in {stack_line()}"
        code = self._signal_code()
        if error is None or code is not None:
            end_now(code or 0, f"warning: {late}")
        code = 2 if isinstance(error, ConfigError) else 1
        bug = "" if isinstance(error, AsyncRLError) else " (a bug in asyncrl)"
        end_now(code, f"error: {type(error).__name__}: {first_line(error)}{bug}\nwarning: {late}")


def stack_line() -> str:
    """Return the place that the main thread executes now: the user function, if it is one, file, line and function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (documented in ``sys``)
    if frame is None:
        return "no Python code"
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_qualname}"
    caller: FrameType | None = frame
    while caller is not None and caller.f_code is not UserCalls.call.__code__:
        caller = caller.f_back
    return place if caller is None else f"{caller.f_locals['self'].name} ({place})"


def _user_threads() -> list[str]:
    """Return the names of threads that the interpreter would wait for, after JOIN_S for those about to end."""
    deadline = time.monotonic() + JOIN_S
    others = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    for each in others:
        each.join(max(0.0, deadline - time.monotonic()))
    return [each.name for each in others if each.is_alive()]


def _after(seconds: float, code: int, line: str) -> None:
    def end() -> None:
        time.sleep(seconds)
        end_now(code, line)

    threading.Thread(target=end, name="exit-timer", daemon=True).start()
