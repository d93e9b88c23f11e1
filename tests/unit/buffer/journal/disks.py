"""Disks for tests: one that counts, one that is full, one that stands still; and a journal written at once."""

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Buffer, Sequence
from pathlib import Path

from asyncrl.buffer.journal import Journal, Record, Snapshot
from asyncrl.buffer.journal.segments import Disk


class CountingDisk(Disk):
    """Counts what a journal asks for."""

    def __init__(self) -> None:
        self.num_synced = 0
        self.num_writes = 0

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        self.num_writes += 1
        return super().write(descriptor, buffers)

    def sync(self, descriptor: int) -> None:
        self.num_synced += 1
        super().sync(descriptor)


class FullDisk(Disk):
    """Has room for some bytes; the write that does not fit is cut, and the next one fails."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        if self._left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = b"".join(bytes(each) for each in buffers)[: self._left]
        self._left -= len(data)
        return os.write(descriptor, data)


class BrokenDisk(Disk):
    """Writes and cannot sync, after some syncs that succeed."""

    def __init__(self, num_synced: int) -> None:
        self._left = num_synced

    def sync(self, descriptor: int) -> None:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class FolderlessDisk(Disk):
    """Cannot sync a folder, for a given reason."""

    def __init__(self, reason: int) -> None:
        self._reason = reason

    def sync(self, descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(self._reason, os.strerror(self._reason))
        super().sync(descriptor)


class StalledDisk(Disk):
    """Writes until ``stalls`` is set, and from then on waits for ``continues``."""

    def __init__(self) -> None:
        self.stalls = threading.Event()
        self.continues = threading.Event()

    def sync(self, descriptor: int) -> None:
        if self.stalls.is_set():
            self.continues.wait(10.0)


class FewBytesDisk(Disk):
    """Takes a few bytes at a time, as a disk may when a signal arrives."""

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        return os.write(descriptor, b"".join(bytes(each) for each in buffers)[:7])


def write(folder: Path, records: Sequence[Record], run_epoch: int = 1, disk: Disk | None = None) -> None:
    """Write records to a new journal in ``folder`` and close it."""

    async def work() -> None:
        journal = Journal(folder, run_epoch, delivered=lambda: 5, disk=disk)
        for record in records:
            if isinstance(record, Snapshot):
                journal.begin_segment(record)
            else:
                journal.append(record)
        await journal.close()
        assert journal.problem is None

    asyncio.run(work())
