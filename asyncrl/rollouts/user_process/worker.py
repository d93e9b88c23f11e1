"""The process of user code: one standard asyncio loop for all episodes and rewards of a run.

    python -m asyncrl.rollouts.user_process.worker FD PARENT_PID

    Load, Log ──▶ without a loop, so that a module may run its own while it is imported
    Serve     ──▶ the loop: Episode, Score ──▶ a task each ──▶ Returned or Raised

consumes      messages of the controller
produces      results of user functions
on failure    a function that raises costs its own call; SystemExit and KeyboardInterrupt count as raising
on cancel     the function's task is cancelled; after FINALLY_S its result no longer matters, and it is counted
on exit       ends with the socket or with the controller
"""

import asyncio
import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncrl.blocking_calls import UserCalls
from asyncrl.daemon_threads import DaemonThreads, in_daemon_thread
from asyncrl.errors import ConfigError
from asyncrl.outages import reached_by
from asyncrl.rollouts.user_process.calls import Calls
from asyncrl.rollouts.user_process.logs import log_without_keys
from asyncrl.rollouts.user_process.messages import (
    Alive,
    Answer,
    Blocked,
    Cancel,
    Episode,
    Load,
    Loaded,
    Log,
    Ping,
    Raised,
    Returned,
    Score,
    Serve,
    Stop,
    in_process,
    to_controller,
)
from asyncrl.rollouts.user_process.plain_values import plain
from asyncrl.rollouts.user_process.results import plain_result
from asyncrl.rollouts.user_process.wire import Wire, WireBroken, receive_now, send_now
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)

FINALLY_S = 10.0
"""Seconds for the ``finally`` blocks of a cancelled function."""
LEAVING_S = 4.0
"""Seconds for the ``finally`` blocks of all functions when the run ends."""
NUM_THREADS = 256
"""Threads of ``asyncio.to_thread``.  Python's default on two cores is 6, which blocking tools of 7 episodes exceed."""
_OURS = str(Path(__file__).parents[2])
"""The folder of this package."""
_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent dies."""


def main(arguments: list[str]) -> None:
    """Serve the controller at the other end of the socket until it closes the socket."""
    number, parent = map(int, arguments)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)
    os.set_inheritable(number, False)  # processes of user code must not keep the socket open
    log_without_keys()
    end = socket.socket(fileno=number)
    try:
        programs = loaded_programs(end)
    except WireBroken:
        return
    # A standard loop, whatever policy the user's modules have set.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(Worker(programs).serve(end))


def loaded_programs(end: socket.socket) -> dict[str, Any]:
    """Make the programs that the controller names, until it says ``Serve``.  Raises WireBroken."""
    programs: dict[str, Any] = {}
    while True:
        match in_process(receive_now(end)):
            case Load(name, factory):
                send_now(end, to_controller(_load(name, factory, programs)))
            case Log(path):
                _write_to(path)
            case Serve():
                return programs
            case Stop():
                raise WireBroken("stopped")
            case other:
                raise WireBroken(f"{type(other).__name__} before Serve")


def _load(name: str, factory: bytes, programs: dict[str, Any]) -> Loaded:
    try:
        programs[name] = pickle.loads(factory)()
    except ConfigError as error:
        return Loaded(name, str(error))
    except BaseException as error:  # noqa: BLE001 (user code at import may raise anything, also SystemExit)
        traceback.print_exc()
        return Loaded(name, f"{type(error).__name__}: {error}", False)
    return Loaded(name, facts=plain(getattr(programs[name], "facts", {}), []))


def _write_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


class Worker:
    """The calls of this process."""

    def __init__(self, programs: dict[str, Any]) -> None:
        self._programs = programs
        self._timed = {name: UserCalls(name, self._tell_blocked) for name in programs}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._num_abandoned = 0

    async def serve(self, end: socket.socket) -> None:
        """Take calls until the controller stops or closes the socket."""
        asyncio.get_running_loop().set_default_executor(DaemonThreads(NUM_THREADS, "tool"))
        for program in self._programs.values():
            if (warm := getattr(program, "warm", None)) is not None:
                in_daemon_thread(partial(_warm, warm), "warm")  # not awaited: the first episode comes much later
        self._wire = await Wire.over(end)
        self._calls = Calls(self._wire)
        async with TaskGroup() as group:
            try:
                while not isinstance(message := in_process(await self._wire.receive()), Stop):
                    self._take(message, group)
            except WireBroken:
                pass
            await self._leave()

    def _take(self, message: object, group: TaskGroup) -> None:
        match message:
            case Episode(call, program, start, address):
                episode = self._calls.opened(call, start, address)
                self._begin(call, group, lambda: self._timed[program].steps(self._programs[program](episode)))
            case Score(call, program, prompt, samples):
                self._begin(call, group, lambda: self._timed[program].steps(self._programs[program](prompt, samples)))
            case Answer(call, ask, turn):
                self._calls.answer(call, ask, turn)
            case Cancel(call):
                self._cancel(call)
            case Ping():
                self._wire.post(to_controller(Alive(_rss_bytes(), self._num_abandoned)))

    def _begin(self, call: int, group: TaskGroup, function: Callable[[], Awaitable[Any]]) -> None:
        task = group.create_task(self._run(call, function), name=f"call-{call}")
        self._tasks[call] = task
        task.add_done_callback(lambda _: self._forget(call))

    async def _run(self, call: int, function: Callable[[], Awaitable[Any]]) -> None:
        """Run a user function and send its result.  Never raises, because any error would end all other calls."""
        try:
            message = to_controller(_returned(call, await function()))
        except BaseException as error:  # noqa: BLE001 (user code may raise anything; a cancelled call is not awaited)
            message = to_controller(_raised(call, error))
        try:
            await self._wire.send(message)
        except ValueError as error:
            await self._wire.send(to_controller(Raised(call, "ValueError", f"the result has {error}", "")))

    def _tell_blocked(self, program: str, seconds: float) -> None:
        self._wire.post(to_controller(Blocked(program, seconds)))

    def _forget(self, call: int) -> None:
        self._tasks.pop(call, None)
        self._calls.close(call)

    def _cancel(self, call: int) -> None:
        task = self._tasks.get(call)
        if task is None:
            return
        self._calls.close(call)
        task.cancel()
        asyncio.get_running_loop().call_later(FINALLY_S, self._abandon, call)

    def _abandon(self, call: int) -> None:
        if call in self._tasks:
            self._num_abandoned += 1
            logger.warning("a cancelled function has not ended within %g s and is left alone", FINALLY_S)

    async def _leave(self) -> None:
        """Cancel all calls and wait for their ``finally`` blocks, within a limit."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=LEAVING_S)
            if left:
                logger.warning("%d functions have not ended within %g s of the run's end", len(left), LEAVING_S)
                sys.stdout.flush()
                os._exit(0)


def _warm(warm: Callable[[], None]) -> None:
    try:
        warm()
    except Exception:  # the first episode raises it again, where it is reported
        logger.debug("a program was not warmed", exc_info=True)


def _returned(call: int, value: Any) -> Returned:
    left_out: list[str] = []
    kind, found = plain_result(value)
    return Returned(call, [kind, plain(found, left_out)], left_out)


def _raised(call: int, error: BaseException) -> Raised:
    try:
        text = str(error)
    except Exception as worse:  # noqa: BLE001 (a user's __str__)
        text = f"(its text raised {type(worse).__name__})"
    lines = traceback.format_exception(type(error), error, _behind_ours(error.__traceback__))
    return Raised(call, type(error).__name__, text, "".join(lines), reached_by(error))


def _behind_ours(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, as far as they are this package's."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OURS):
        first = first.tb_next
    return first or frames


def _rss_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as statm:  # 20 microseconds
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])
