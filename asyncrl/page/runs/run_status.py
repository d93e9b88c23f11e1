"""Whether a run is running, has ended, or was killed: ``status.json`` in its run directory.

The run writes the file when it begins and when it ends.  A run that was killed leaves the file of its beginning, whose
process is then gone.
"""

import os
import socket
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import orjson
import psutil

from asyncrl.plain_text import encodable
from asyncrl.process_identity import machine_id, start_of

STATUS_FILE = "status.json"


class State(StrEnum):
    """The state of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    KILLED = "killed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The content of the file.  Times are seconds since 1970."""

    host: str
    pid: int
    process_began: float
    """The beginning of the process; a later look finds another time if the clock was set."""
    began: float
    ended: float | None = None
    exit_code: int | None = None
    reason: str = ""
    """One line; empty unless the run failed."""
    machine: str | None = None
    """The ``machine_id`` of the process; None in files of earlier versions."""
    process: str | None = None
    """The ``start_of`` time of the process, which tells it from later ones with the same id."""


class StatusFile:
    """Writes the status of this process's run.  No method raises OSError: a status is only looked at."""

    def __init__(self, run_dir: Path) -> None:
        status = RunStatus(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_began=psutil.Process().create_time(),
            began=time.time(),
            machine=machine_id(),
            process=start_of(os.getpid()),
        )
        self._path = run_dir / STATUS_FILE
        self._status = status
        self._write(status)

    def end(self, exit_code: int, reason: str) -> None:
        """Record the end of the run."""
        fields = asdict(self._status) | {"ended": time.time(), "exit_code": exit_code, "reason": encodable(reason)}
        self._write(RunStatus(**fields))

    def _write(self, status: RunStatus) -> None:
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_bytes(orjson.dumps(asdict(status), option=orjson.OPT_INDENT_2))
            partial.replace(self._path)
        except OSError:
            pass  # the other files of the run directory report a full disk


def read_status(run_dir: Path) -> RunStatus | None:
    """Return the status in ``run_dir``; None if there is none that can be read."""
    try:
        return RunStatus(**orjson.loads((run_dir / STATUS_FILE).read_bytes()))
    except (OSError, TypeError, ValueError):
        return None


def state_of(status: RunStatus | None) -> State:
    """Return the state of a run, as far as this machine can tell."""
    if status is None:
        return State.UNKNOWN
    if status.ended is None:
        if status.host != socket.gethostname():
            return State.UNKNOWN
        return State.RUNNING if _is_alive(status) else State.KILLED
    if status.exit_code == 0:
        return State.FINISHED
    return State.STOPPED if status.exit_code in {130, 143} else State.FAILED


def _is_alive(status: RunStatus) -> bool:
    if status.machine is not None and status.process is not None:
        return status.machine == machine_id() and start_of(status.pid) == status.process
    try:  # an earlier version wrote the file, or the system has no /proc
        return abs(psutil.Process(status.pid).create_time() - status.process_began) < 1.0
    except psutil.Error:
        return False
