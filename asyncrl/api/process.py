"""The process of a run, as the program that started it sees it.

    the user's program                              the run: asyncrl.api.program
    Steps ◀── RunProcess (a thread) ◀── socket ◀──── Reports: run directory, rows, error
    end of a loop, exit ──────────── SIGTERM ──────▶ Signals
    killed ──────────────────── end of the socket ──▶ SIGTERM, which the run sends to itself

docs/design/0017-runs-driven-from-python.md says why the run is a process apart.
"""

import asyncio
import atexit
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import IO, Any

import orjson

from asyncrl import errors
from asyncrl.errors import AsyncRLError, ServerFailed

PROGRAM = ("-m", "asyncrl.api.program")
"""The run's program, for the interpreter of this process."""
ENDING_S = 330.0
"""Seconds after SIGTERM, and after its grace, until the run is killed.  It ends by itself after 300 s at most."""
AGAIN_S = 1.1
"""Seconds after SIGTERM from which SIGINT ends the run at once (``app.signals``)."""
KILL_S = 15.0
"""Seconds for the end at once, which kills every process of the run."""
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a run: complete, or asked for, or with the error that ended it."""

    error: Exception | None


class RunProcess:
    """One start of a run.  All methods are safe to call from any thread."""

    def __init__(
        self, argv: Sequence[str], *, grace_s: float, shows_output: bool, program: Sequence[str] = PROGRAM
    ) -> None:
        """Start the run that ``argv`` describes.

        ``grace_s`` is its time for a checkpoint after SIGTERM.  With ``shows_output`` it prints where this program
        prints.  Raises ServerFailed.
        """
        self._messages = SimpleQueue[Mapping[str, Any] | Ended]()
        self._wake: Callable[[], object] = _nothing
        self._over = threading.Event()
        self._asked_at: float | None = None
        self._grace_s = grace_s
        self._lock = threading.RLock()  # a collection of garbage may call ``end`` anywhere
        self._timers = list[threading.Timer]()
        self._errors: IO[bytes] | None = None if shows_output else tempfile.TemporaryFile()  # noqa: SIM115 (_last_line)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = self._started([sys.executable, *program, str(theirs.fileno()), *argv], theirs.fileno())
        atexit.register(self.close)
        threading.Thread(target=self._follow, name="run-messages", daemon=True).start()

    def _started(self, command: Sequence[str], descriptor: int) -> subprocess.Popen[bytes]:
        output = None if self._errors is None else subprocess.DEVNULL
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self._errors,
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C and a kernel's interrupt reach this program alone
            )
        except OSError as error:
            raise ServerFailed(f"the process of the run did not start: {error}") from error

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def get(self) -> Mapping[str, Any] | Ended:
        """Wait for the next message, and return it.  There is none after ``Ended``."""
        return self._messages.get()

    async def aget(self) -> Mapping[str, Any] | Ended:
        """Do what ``get`` does on an event loop."""
        loop, has_more = asyncio.get_running_loop(), asyncio.Event()
        # Invariant: the thread puts a message first and wakes the loop then, so no message is missed between the look
        # at the queue and the wait.
        self._wake = lambda: loop.call_soon_threadsafe(has_more.set)
        while self._messages.empty():
            await has_more.wait()
            has_more.clear()
        return self._messages.get_nowait()

    def end(self) -> None:
        """Ask the run to end in an orderly way, and return at once.  No effect if it has ended or was asked before."""
        with self._lock:
            if self._asked_at is not None or self._over.is_set():
                return
            self._asked_at = time.monotonic()
            self._send_later(signal.SIGKILL, ENDING_S + self._grace_s)
            _left.add(self)
        self._send(signal.SIGTERM)

    def hurry(self) -> None:
        """Have the run end at once, as a second Ctrl-C does."""
        self.end()
        with self._lock:
            if not self._over.is_set() and self._asked_at is not None:
                wait_s = max(0.0, self._asked_at + AGAIN_S - time.monotonic())
                self._send_later(signal.SIGINT, wait_s)
                self._send_later(signal.SIGKILL, wait_s + KILL_S)

    def wait(self) -> None:
        """Return once the run has ended.  An interrupt of the wait ends the run at once, and is raised then."""
        try:
            self._over.wait()
        except BaseException:
            self.hurry()
            self._over.wait()
            raise

    def close(self) -> None:
        """End the run and wait for its end."""
        self.end()
        self.wait()

    def _send(self, number: signal.Signals) -> None:
        with suppress(OSError):  # it has just ended
            self._process.send_signal(number)

    def _send_later(self, number: signal.Signals, seconds: float) -> None:
        timer = threading.Timer(seconds, self._send, [number])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _follow(self) -> None:
        """Take every message as it comes, however slowly the user's loop asks for steps, and then the end."""
        told = None
        try:
            told = self._take_messages()
        finally:  # whatever fails, the loop hears of an end
            self._finish(told)

    def _take_messages(self) -> Mapping[str, str] | None:
        """Pass on the rows until the run ends, and return the error that it told."""
        told, place = None, dict[str, Any]()
        with self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                message = orjson.loads(line)
                place = message if "run_dir" in message else place
                told = message.get("error", told)
                if "row" in message:
                    self._put({**place, "row": message["row"]})
        return told

    def _finish(self, told: Mapping[str, str] | None) -> None:
        code = self._process.wait()  # nothing but its exit closes the run's end of the socket
        with self._lock:
            self._over.set()
            _left.discard(self)
            for timer in self._timers:
                timer.cancel()
        atexit.unregister(self.close)
        last_line = self._last_line()
        self._put(Ended(self._error(told, code, last_line)))

    def _put(self, message: Mapping[str, Any] | Ended) -> None:
        self._messages.put(message)
        with suppress(RuntimeError):  # the loop is closed
            self._wake()

    def _error(self, told: Mapping[str, str] | None, code: int, last_line: str) -> Exception | None:
        if told is not None:
            return error_of(told["name"], told["text"])
        if code == 0 or self._asked_at is not None:
            return None
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return ServerFailed(f"the process of the run ended with {cause}{last_line and f': {last_line}'}")

    def _last_line(self) -> str:
        """Return the last line that the run printed as an error; empty if its output is shown."""
        if self._errors is None:
            return ""
        with self._errors as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else ""


_left = set[RunProcess]()
"""Runs of this process that were asked to end and have not ended yet."""


def wait_for_left_runs() -> None:
    """Return once every run that was left early has ended: the next one may need its GPUs, ports or ``--save``."""
    for process in tuple(_left):
        process.wait()


def error_of(name: str, text: str) -> Exception:
    """Return the error of ``asyncrl.errors`` that is called ``name``; a RuntimeError for any other one."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, AsyncRLError)):
        return RuntimeError(text)
    try:
        return kind(text)
    except TypeError:  # its constructor takes more than a text
        return AsyncRLError(f"{name}: {text}")


def _nothing() -> None:
    pass
