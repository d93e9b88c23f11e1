"""The lease on a folder of checkpoints: at most one run writes to it.  Imports neither torch nor Megatron.

DIR/.lease/0000007.json        the claim with fencing token 7; its modification time is the heartbeat
DIR/.lease/0000007.released    the run of that claim has ended

    take: watch the newest claim until it ends ─▶ create the next one ─▶ ``writes.fence``: remove what other runs write
    commit, on any host: create the files ─▶ ``check``: is the own claim the newest? ─▶ rename

Invariant: a run creates what it will rename before it checks, and the next run fences after it has created its claim.
If the check passes, then the fence comes later: it removes the source of the rename, which then fails in the file
system, or the rename comes first, and the next run reads the folder after it.

The file system decides who gets a token, because a file is created exclusively.  No clocks are compared: a claim has
expired if its file did not change for EXPIRES_S seconds of the clock of the process that watches it.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import orjson

from asyncrl.errors import LeaseLost, NotNow
from asyncrl.process_identity import machine_id, start_of

FOLDER = ".lease"
HEARTBEAT_S = 2.0
"""Seconds between heartbeats of the run that holds a folder.  A second run needs as long to find it alive."""
EXPIRES_S = 30.0
"""Seconds without a heartbeat after which another run may take the folder: some missed heartbeats, and an outage of a
file server that a restart ends."""
LOOK_EVERY_S = 0.1
"""Seconds between two looks at another run's heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of one run to a folder of checkpoints.  Ranks on all hosts get it with each checkpoint to write."""

    root: Path
    token: int
    """The fencing token.  The claim with the highest token is valid; tokens are never used twice."""
    run: str
    """A random id of the run, which is in the names of its partial checkpoints."""
    host: str
    pid: int
    since: str
    """Date and time of the host's clock, for people."""
    machine: str | None
    """An id of this boot of the machine and of its set of process ids; None if the system has none."""
    process: str | None
    """The start time of the process, which tells it from later processes with the same id."""

    @property
    def path(self) -> Path:
        """The claim's file."""
        return _path(self.root, self.token)

    def __str__(self) -> str:
        return f"run {self.run} (process {self.pid} on {self.host}) since {self.since}"


def take(root: Path, say: Callable[[str], None], after: int = 0) -> Claim:
    """Claim the existing folder ``root`` for this process, and return the claim.

    Blocks for at most EXPIRES_S seconds while it is unknown whether the last holder still lives; ``say`` gets a line
    then.  The token is above ``after``, also if the folder was copied without its leases.  Raises NotNow, with one line
    that names the holder, if it does; or OSError.
    """
    (root / FOLDER).mkdir(exist_ok=True)
    while True:
        newest = _newest(root)
        if newest is not None and not _has_ended(root, newest, say):
            continue  # another run has claimed the folder meanwhile
        claim = _of_this_process(root, max(newest or 0, after) + 1)
        try:
            _create(claim.path, orjson.dumps(_written(claim)))
        except FileExistsError:
            continue
        with suppress(LeaseLost):  # this process may have slept since then, for longer than a claim lives
            check(claim)
            _forget_before(claim)
            return claim


def check(claim: Claim) -> None:
    """Raise LeaseLost if another run has claimed the folder since; OSError if that is unknown."""
    # Creating and removing a file makes an NFS client drop what it remembers of the folder, which may be a minute old.
    probe = claim.root / FOLDER / f"{claim.run}-{uuid4().hex[:8]}.probe"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except FileNotFoundError as error:
        raise LeaseLost(f"save {claim.root}: its folder {FOLDER} was removed, with the lease of this run") from error
    check_newest(claim)


def check_newest(claim: Claim) -> None:
    """Raise LeaseLost like ``check``, from what a network file system may remember of the folder."""
    newest = _newest(claim.root)
    if newest == claim.token:
        return
    holder = None if newest is None else _read(claim.root, newest)
    by = "its claim was removed" if newest is None else f"it is held by {holder or 'another run'}"
    raise LeaseLost(f"save {claim.root}: this run lost its lease and writes nothing more: {by}")


def renew(claim: Claim) -> None:
    """Give a heartbeat.  Raises LeaseLost, or OSError if the file system does not answer."""
    with suppress(FileNotFoundError):
        os.utime(claim.path)
    check_newest(claim)


def release(claim: Claim) -> None:
    """Let the next run claim the folder at once.  Raises OSError."""
    with suppress(FileExistsError, FileNotFoundError):
        _create(_released(claim.root, claim.token), b"")


# ---- the claim of another run


def _has_ended(root: Path, token: int, say: Callable[[str], None]) -> bool:
    """Watch the claim until it has ended: True, or until there is a newer one: False.  Raises NotNow.

    A claim has ended if it was released, if its process is dead, or if it has expired.
    """
    beat, deadline, has_said = _beat(root, token), time.monotonic() + EXPIRES_S, False
    while True:
        holder = _read(root, token)
        if _released(root, token).exists() or (holder is not None and _is_dead(holder)):
            return True
        if _newest(root) != token:
            return False
        if (now := _beat(root, token)) != beat and holder is not None:
            raise NotNow(f"save {root} is held by {holder}: end that run, or give another folder")
        beat = now
        if time.monotonic() >= deadline:
            return True
        if not has_said and time.monotonic() > deadline - EXPIRES_S + 2 * HEARTBEAT_S:
            say(f"save {root}: waiting up to {EXPIRES_S:g} s for a sign of {holder or 'another run'}")
            has_said = True
        time.sleep(LOOK_EVERY_S)


def _is_dead(holder: Claim) -> bool:
    """Whether the holder's process is known to have ended, because it ran on this machine."""
    if holder.machine is None or holder.process is None or holder.machine != machine_id():
        return False
    return start_of(holder.pid) != holder.process


def _beat(root: Path, token: int) -> int | None:
    """Return the time of the last heartbeat, by the clock of the file system."""
    try:
        # Opening makes an NFS client ask the server; a mere stat may return what it remembers.
        with _path(root, token).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _newest(root: Path) -> int | None:
    """Return the highest token that was taken."""
    with suppress(FileNotFoundError):
        tokens = [path.stem for path in (root / FOLDER).iterdir() if path.suffix == ".json"]
        return max((int(token) for token in tokens if token.isdecimal()), default=None)
    return None


def _forget_before(claim: Claim) -> None:
    """Remove the files of older claims.  The newest is never removed, so that tokens increase for ever."""
    with suppress(OSError):
        for path in (claim.root / FOLDER).iterdir():
            if path.stem.isdecimal() and int(path.stem) < claim.token:
                path.unlink(missing_ok=True)


# ---- files


def _path(root: Path, token: int) -> Path:
    return root / FOLDER / f"{token:07}.json"


def _released(root: Path, token: int) -> Path:
    return root / FOLDER / f"{token:07}.released"


def _create(path: Path, content: bytes) -> None:
    """Create the file with its content.  Raises FileExistsError: of several processes, one succeeds."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _written(claim: Claim) -> dict[str, str | int | None]:
    names = ("run", "host", "pid", "since", "machine", "process")
    return {name: getattr(claim, name) for name in names}


def _read(root: Path, token: int) -> Claim | None:
    """Return the claim; None if it is not there, or its process has not written it yet."""
    try:
        return Claim(root=root, token=token, **orjson.loads(_path(root, token).read_bytes()))
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):
        return None


def _of_this_process(root: Path, token: int) -> Claim:
    return Claim(
        root=root,
        token=token,
        run=uuid4().hex[:8],
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.now().astimezone().isoformat(" ", "seconds"),
        machine=machine_id(),
        process=start_of(os.getpid()),
    )
