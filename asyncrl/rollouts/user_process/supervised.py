"""One process of user code that is started again when it dies, and its open calls.

consumes      calls: episodes and rewards
produces      their messages, in order
waits for     the process to load its programs; a call that arrives meanwhile waits with it
on failure    a process that dies or stands still for STUCK_S costs its open calls and is started again, at once for the
              first time and with growing pauses if it dies again before any call has ended
on cancel     the user's function is cancelled in the process
on exit       functions get LEAVING_S of ``worker`` for their ``finally`` blocks, then the session is killed
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import PluginError, UserProcessFailed, plainly
from asyncrl.event_loop import Deadline, is_cancelled
from asyncrl.rollouts.user_process.messages import (
    Alive,
    Ask,
    Blocked,
    Cancel,
    FromProcess,
    Load,
    Loaded,
    Log,
    Ping,
    Raised,
    Returned,
    Serve,
    Stop,
    ToProcess,
    Unask,
    in_controller,
    to_process,
)
from asyncrl.rollouts.user_process.plain_values import Unpacking
from asyncrl.rollouts.user_process.process import UserCodeProcess, facts_of
from asyncrl.rollouts.user_process.wire import CLOSED, Wire, WireBroken
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)

BEAT_S = 5.0
"""Seconds between two questions whether the process's event loop runs."""
STUCK_S = 120.0
"""Seconds without any message after which a process is killed.  Users' files block their loop for seconds at a time."""
EXIT_S = 8.0
"""Seconds for the process to end when the run does: its functions' ``finally`` blocks, then the interpreter's exit."""
MOST_IN_A_ROW = 8
"""Deaths without the end of a single call in between, after which the run stops."""
LONGEST_PAUSE_S = 30.0
"""Seconds before a new start, at most; the pauses are 0, 1, 2, 4, ..."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a call ended before the call did."""

    how: str


class OpenCall:
    """A call in progress, as its caller sees it."""

    def __init__(self, number: int, process: "SupervisedProcess") -> None:
        self.number = number
        self.inbox: asyncio.Queue[FromProcess | Died] = asyncio.Queue()
        self._process = process

    async def receive(self) -> FromProcess | Died:
        """Return the next message of the call."""
        return await self.inbox.get()

    async def send(self, message: ToProcess) -> None:
        """Send a message about this call; no-op if its process is gone."""
        await self._process.send(message)


class SupervisedProcess:
    """A process of user code.  ``run`` keeps it alive; calls may be opened from other tasks."""

    def __init__(
        self,
        number: int,
        programs: Mapping[str, bytes],
        *,
        log_path: Path,
        start_timeout_s: float,
        started: UserCodeProcess | None = None,
    ) -> None:
        """``started`` has loaded all ``programs``; without it, ``run`` starts the first process as well."""
        self.name = f"user-code-{number}"
        self.num_restarts = 0
        self.rss_bytes = 0
        self.num_abandoned = 0
        self._programs = programs
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._next = started
        self._wire: Wire | None = None
        self._numbers = count()
        self._calls: dict[int, OpenCall] = {}
        self._serving = asyncio.Event()
        self._num_in_a_row = 0
        self._has_served = False
        self._num_unanswered = 0
        self._blocking = set[str]()

    @property
    def num_calls(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    async def ready(self) -> None:
        """Wait until the process has loaded its programs."""
        await self._serving.wait()

    async def run(self) -> NoReturn:
        """Keep the process alive until cancelled.  Raises UserProcessFailed."""
        while True:
            how = await self._one_life()
            self._num_in_a_row += 1
            self.num_restarts += 1
            if self._num_in_a_row >= MOST_IN_A_ROW:
                raise UserProcessFailed(
                    f"{self.name} ended {MOST_IN_A_ROW} times in a row before any call of it was done; the last time: "
                    f"{how} (log: {self._log_path})"
                )
            pause_s = 0.0 if self._num_in_a_row == 1 else min(2.0 ** (self._num_in_a_row - 2), LONGEST_PAUSE_S)
            logger.warning("%s ended: %s; it is started again (log: %s)", self.name, how, self._log_path)
            await asyncio.sleep(pause_s)

    async def close(self) -> None:
        """End a process that ``run`` has not taken over, since it was cancelled before it began."""
        if self._next is not None:
            await off_loop(self._next.kill, self.name)

    @asynccontextmanager
    async def call(self, message: Callable[[int], ToProcess]) -> AsyncIterator[OpenCall]:
        """Open a call: ``message`` returns its first message.  Leaving the block before its end cancels it.

        Raises ValueError if the message is too long, and what pickling its values raises.
        """
        while not self._serving.is_set():
            await self._serving.wait()
        call = OpenCall(next(self._numbers), self)
        packed = to_process(message(call.number))
        self._calls[call.number] = call
        try:
            await self._send(packed)
            yield call
        finally:
            if self._calls.pop(call.number, None) is not None and self._wire is not None:
                self._wire.post(to_process(Cancel(call.number)))

    async def send(self, message: ToProcess) -> None:
        """Send a message; no-op if no process is there."""
        await self._send(to_process(message))

    async def _send(self, packed: list[bytes]) -> None:
        if self._wire is not None:
            await self._wire.send(packed)

    async def _one_life(self) -> str:
        """Run one process to its end and return how it ended."""
        process, self._next = self._next, None
        is_loaded = process is not None
        process = process or UserCodeProcess()
        wire: Wire | None = None
        try:
            wire = await Wire.over(process.end)
            await self._prepare(process, wire, is_loaded=is_loaded)
            self._begin_serving(wire)
            with plainly():
                async with TaskGroup() as group:
                    group.create_task(self._ask_whether_alive(wire), name=f"{self.name}-heartbeat")
                    await self._hand_over_messages(wire)
        except PluginError as error:
            if not self._has_served:
                raise
            how = f"it did not start again: {error}"
        except WireBroken as error:
            how = str(error)
            if self._num_unanswered >= STUCK_S / BEAT_S:
                how = f"its event loop stood still for {STUCK_S:g} s, so it was killed"
            elif str(error) == CLOSED:
                how = await off_loop(process.how_it_ended, self.name)
        finally:
            self._serving.clear()
            self._wire = None
            await self._end(process, wire)
        self._fail_calls(how)
        return how

    async def _prepare(self, process: UserCodeProcess, wire: Wire, *, is_loaded: bool) -> None:
        """Give the process its log file and its programs.  Raises PluginError and WireBroken."""
        await off_loop(partial(_begin_log, self._log_path, process.early_output()), self.name)
        wire.post(to_process(Log(str(self._log_path.resolve()))))
        try:
            async with Deadline(self._start_timeout_s):
                for name, factory in () if is_loaded else self._programs.items():
                    await wire.send(to_process(Load(name, factory)))
                    facts_of(await _received(wire))
        except TimeoutError:
            raise PluginError(f"its import did not end within {self._start_timeout_s:g} s (start-timeout-s)") from None

    def _begin_serving(self, wire: Wire) -> None:
        wire.post(to_process(Serve()))
        self._wire = wire
        self._num_unanswered = 0
        self._has_served = True
        self._serving.set()

    async def _hand_over_messages(self, wire: Wire) -> NoReturn:
        """Hand messages to their calls.  Raises WireBroken."""
        while True:
            message = await _received(wire)
            self._num_unanswered = 0
            if isinstance(message, Alive):
                self.rss_bytes, self.num_abandoned = message.rss_bytes, message.num_abandoned
            elif isinstance(message, Blocked):
                self._warn_of_block(message)
            else:
                self._hand_over(message)

    def _warn_of_block(self, message: Blocked) -> None:
        """Name a program that blocked the loop of the process, once per run.  The process is not trusted."""
        is_known = message.program in self._programs and isinstance(message.seconds, float)
        if is_known and message.program not in self._blocking:
            self._blocking.add(message.program)
            logger.warning(
                "%s: %s blocked the event loop of its process for %.0f ms: its other episodes and rewards stand still "
                "meanwhile; await the slow part, or write a reward as a plain def (said once)",
                self.name,
                message.program,
                1000 * message.seconds,
            )

    def _hand_over(self, message: Loaded | Ask | Unask | Returned | Raised) -> None:
        number = getattr(message, "call", -1)
        call = self._calls.get(number)
        if call is None:  # cancelled meanwhile: its results do not matter any more
            return
        if isinstance(message, Returned | Raised):
            del self._calls[number]
            self._num_in_a_row = 0
        call.inbox.put_nowait(message)

    async def _ask_whether_alive(self, wire: Wire) -> None:
        """Close the socket of a process that leaves too many questions unanswered."""
        # Questions are counted, not seconds: a controller that was suspended must not kill its processes.
        while self._num_unanswered < STUCK_S / BEAT_S:
            self._num_unanswered += 1
            wire.post(to_process(Ping()))
            await asyncio.sleep(BEAT_S)
        wire.close()

    def _fail_calls(self, how: str) -> None:
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.inbox.put_nowait(Died(how))

    async def _end(self, process: UserCodeProcess, wire: Wire | None) -> None:
        """End a process: if it serves, it may leave by itself within EXIT_S.  Then its session is killed."""
        try:
            if wire is not None and is_cancelled():
                wire.post(to_process(Stop()))
                await off_loop(partial(process.wait, EXIT_S), self.name)
        finally:
            if wire is not None:
                wire.close()
            await off_loop(process.kill, self.name)


async def _received(wire: Wire) -> FromProcess:
    pieces = await wire.receive()
    unpacking, values = Unpacking(), None
    try:
        for place, piece in enumerate(pieces):
            if place:  # a large message must not keep other tasks waiting
                await asyncio.sleep(0)
            values = unpacking.add(piece)
    except (ValueError, TypeError) as error:
        raise WireBroken(f"it sent a message that cannot be read: {error}") from error
    return in_controller(values)


def _begin_log(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        log.write(text)
