"""The writing of a folder of checkpoints: partial folders, the commit, and the deletion of old checkpoints.

Everything that a run is writing has the run's id in its name until it is renamed; ``lease`` explains why.  Imports
neither torch nor Megatron.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from asyncrl import mischief
from asyncrl.engines.megatron.checkpoint.checksums import Part, write_checksums
from asyncrl.engines.megatron.checkpoint.directory import (
    PARTIAL,
    RELEASE,
    RUN_FILE,
    TRACKER,
    folder_of,
    is_complete,
    outdated_of,
)
from asyncrl.engines.megatron.checkpoint.lease import Claim, check
from asyncrl.errors import CheckpointFailed
from asyncrl.folder_sync import where_known

logger = logging.getLogger(__name__)

DELETED = ".deleted"
"""Suffix of folders that are being deleted."""
_NAME = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A checkpoint that a run is about to write.  Every rank gets the same one."""

    claim: Claim
    step: int
    keep: int | None = None
    """The number of newest checkpoints to keep; None keeps all."""
    spared: Path | None = None
    """The checkpoint that the run started from, which is kept in any case."""

    @property
    def folder(self) -> Path:
        """The folder of the complete checkpoint."""
        return folder_of(self.claim.root, self.step)

    @property
    def partial(self) -> Path:
        """The folder while it is written."""
        return self.folder.with_name(f"{self.folder.name}.{self.claim.run}{PARTIAL}")


class Permit:
    """The permission of one save to change the folder, until the run gives the save up.

    Invariant: the saves of a process share one lock, and hold it from the test of their permit to the end of a rename.
    A save that was given up before a later one began therefore renames before the later one does, or never.
    """

    def __init__(self, lock: Lock) -> None:
        """``lock`` is the same for all saves of the process."""
        self._lock = lock
        self.is_withdrawn = False
        """Whether the run has given the save up."""

    def withdraw(self) -> None:
        """Give the save up.  Takes no lock, because the thread that holds it may hang in a dead file system."""
        self.is_withdrawn = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other saves from the folder during the block.  Raises CheckpointFailed if the save was given up."""
        with self._lock:
            if self.is_withdrawn:
                raise CheckpointFailed("the save was given up, because it was not written in time")
            yield


def fence(claim: Claim) -> None:
    """Remove what other runs left, or are still writing: they cannot rename it any more.  Raises OSError.

    A checkpoint that was being replaced gets its name back.  Call this right after the claim, before the folder is
    read.
    """
    root = claim.root
    for path in root.glob(f"{TRACKER}*{PARTIAL}"):
        path.unlink(missing_ok=True)
    for path in root.glob(f"iter_*{PARTIAL}"):
        # Renamed first: that takes the source of a commit away at once, while deleting takes seconds.
        with suppress(FileNotFoundError):  # the other run has just named or removed it
            path.rename(path.with_name(path.name + DELETED))
    for path in root.glob("iter_*.outdated"):
        folder = path.with_suffix("")
        if not folder.exists():
            with suppress(FileNotFoundError):
                path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f"iter_*{DELETED}"):
        shutil.rmtree(path, ignore_errors=True)  # a rank of a run that is ending may still write files to it


def open_partial(target: Target) -> None:
    """Create the empty partial folder of a checkpoint, and remove any that this run left before.

    Raises LeaseLost if another run has taken the folder, or OSError.
    """
    check(target.claim)
    for left in target.claim.root.glob(f"iter_*.{target.claim.run}{PARTIAL}"):
        shutil.rmtree(left)
    target.partial.mkdir(parents=True)


def commit(target: Target, notes: bytes, parts: Mapping[str, Iterable[Part]], permit: Permit | None = None) -> None:
    """Complete the written partial folder, rename it, make it the latest checkpoint, and delete old ones.

    ``parts`` are the parts of each shard.  Raises LeaseLost if another run has taken the folder, CheckpointFailed if
    files are torn or ``permit`` was withdrawn, or OSError; the latest checkpoint is then as before.
    """
    permit = permit or Permit(Lock())
    partial, folder = target.partial, target.folder
    _write(partial / RUN_FILE, notes)
    mischief.at("checkpoint without checksums")
    write_checksums(partial, parts)
    for path in (*partial.iterdir(), partial):  # Megatron and torch do not flush the end of some files to the disk
        sync(path)
    with permit.held():
        check(target.claim)
        mischief.at("checkpoint without its name")
        _replace(folder, partial)
    mischief.at("checkpoint that is not the latest")
    sync(folder.parent)
    with permit.held():
        _name_latest(target.claim, str(target.step))
    shutil.rmtree(outdated_of(folder), ignore_errors=True)
    try:
        _delete_old(target)
    except OSError as error:
        logger.warning("save %s: old checkpoints were not deleted: %s", folder.parent, error)


def write_release(folder: Path, notes: bytes) -> None:
    """Make the written ``folder``, which has weights alone, the latest checkpoint.  Raises OSError."""
    _write(folder / RUN_FILE, notes)
    sync(folder)
    _rename_tracker(folder.parent, RELEASE, RELEASE)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk.  Raises OSError.

    A rename is on the disk only when its folder has been flushed.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        with where_known() if path.is_dir() else nullcontext():
            os.fsync(number)
    finally:
        os.close(number)


def _replace(folder: Path, partial: Path) -> None:
    """Rename ``partial`` to ``folder``; a folder with this name is outdated then."""
    outdated, is_moved = outdated_of(folder), folder.exists()
    if is_moved:  # the run was resumed from an earlier checkpoint
        shutil.rmtree(outdated, ignore_errors=True)
        folder.rename(outdated)
        mischief.at("checkpoint that is being replaced")
    try:
        partial.rename(folder)
    except OSError:
        if is_moved:
            with suppress(OSError):
                outdated.rename(folder)
        raise


def _name_latest(claim: Claim, name: str) -> None:
    _rename_tracker(claim.root, name, claim.run, claim)


def _rename_tracker(root: Path, name: str, writer: str, claim: Claim | None = None) -> None:
    tracker = root / TRACKER
    partial = tracker.with_name(f"{tracker.name}.{writer}{PARTIAL}")
    _write(partial, name.encode())
    if claim is not None:
        check(claim)
    mischief.at("tracker without its name")
    partial.rename(tracker)
    mischief.at("tracker in its place")
    sync(root)


def _delete_old(target: Target) -> None:
    """Delete all but the ``keep`` newest checkpoints.  Those of later steps stay: another run wrote them."""
    if target.keep is None:
        return
    steps = {int(name[1]): path for path in target.claim.root.iterdir() if (name := _NAME.fullmatch(path.name))}
    done = sorted((step for step, path in steps.items() if step <= target.step and is_complete(path)), reverse=True)
    spared = None if target.spared is None else target.spared.resolve()
    for step in done[target.keep :]:
        if steps[step].resolve() == spared:
            continue
        check(target.claim)
        deleted = steps[step].with_name(steps[step].name + DELETED)
        steps[step].rename(deleted)
        shutil.rmtree(deleted)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        mischief.at("empty file")
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
