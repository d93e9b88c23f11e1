"""The code that runs in a worker process: limits of the process, and calls of graders and user functions.

A worker imports this module before its first answer, so it imports little.
"""

import ctypes
import functools
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import _forkserver
from typing import Any

from asyncrl.outages import reached_by

_PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent dies."""

EXIT_0 = 256
"""The exit code of a worker that ended with 0: pebble takes 0 for an end that it asked for, and waits for the call."""


class WorkerProcess(ForkServerProcess):
    """A worker as the driver sees it.  The processes that it started end with it."""

    _has_group = True

    @property
    def exitcode(self) -> int | None:
        """The exit code, or EXIT_0; None while the process runs."""
        code = super().exitcode
        return EXIT_0 if code == 0 else code

    def is_alive(self) -> bool:
        """Return whether the process runs; kill its process group as soon as it does not.

        pebble asks this about every worker, and after it has killed one.
        """
        if super().is_alive():
            return True
        if self._has_group and self.pid is not None:
            self._has_group = False  # once: the id may become another group's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return False


class Context(ForkServerContext):
    """The start method of workers: forks of a process that has imported the graders."""

    Process = WorkerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception of a reward, as text: its class may not be importable, or not picklable, in the driver."""

    type: str
    message: str
    traceback: str
    reached: bool | None = None
    """See ``outages.reached_by``."""


def start(memory_bytes: int | None) -> None:
    """Prepare a new worker: it ends with its parent, ends at once when it is told to, and has limited memory.

    It leads a process group, so that its children can be killed with it.
    """
    os.setsid()
    # A grader in a C loop never runs Python's handlers, so the default action must apply.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The driver's death ends the fork server, and that ends this worker, even in a C loop.  Python gives every worker
    # the pipe that keeps the fork server alive, so with that pipe open neither would ever end.
    keeps_alive = vars(_forkserver)["_forkserver_alive_fd"]
    if keeps_alive is not None:
        os.close(keeps_alive)
        vars(_forkserver)["_forkserver_alive_fd"] = None
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1:  # the parent died before the line above
        os._exit(1)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def warm(modules: tuple[str, ...]) -> int:
    """Import modules; return the id of this process."""
    for module in modules:
        __import__(module)
    return os.getpid()


def call(resolver: bytes, arguments: bytes) -> Any:
    """Return what the function of a pickled resolver returns, pickled, or ``Raised``.

    The resolver is a function without parameters that returns the function to call.  It runs once per process.
    ``arguments`` is a pickled tuple.
    """
    try:
        return pickle.dumps(plain(_resolved(resolver)(*pickle.loads(arguments))))
    except BaseException as error:  # noqa: BLE001 (a user function may raise anything, also SystemExit)
        return _raised(error)


def load(resolver: bytes) -> Raised | None:
    """Make the function of a pickled resolver; its calls in this process use it."""
    try:
        _resolved(resolver)
    except BaseException as error:  # noqa: BLE001 (a user's constructor)
        return _raised(error)
    return None


def plain(value: Any) -> Any:
    """Return numbers of numpy and torch as Python's; the driver need not import those."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@functools.cache
def _resolved(resolver: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = pickle.loads(resolver)()
    return function


def _raised(error: BaseException) -> Raised:
    return Raised(
        type=type(error).__name__,
        message=_text(error),
        traceback="".join(traceback.format_exception(error)),
        reached=reached_by(error),
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001 (a user's __str__)
        return f"(its text raised {type(worse).__name__})"
