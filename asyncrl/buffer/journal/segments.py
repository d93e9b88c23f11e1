"""The files of a journal: ``segment-000001.journal`` and so on, in one folder."""

import os
from collections.abc import Buffer, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.journal.frames import SEGMENT_BYTES, SegmentHeader, segment_header
from asyncrl.folder_sync import where_known

_PATTERN = "segment-*.journal"
_MOST_BUFFERS = 512
"""Buffers of one call; Linux allows 1,024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A file of a journal."""

    number: int
    path: Path


def segment_of(folder: Path, number: int) -> Segment:
    """Return the segment with a number."""
    return Segment(number=number, path=folder / f"segment-{number:06d}.journal")


def segments(folder: Path) -> list[Segment]:
    """Return the segments of a folder in order.  Raises OSError."""
    numbers = (path.stem.partition("-")[2] for path in folder.glob(_PATTERN))
    return [segment_of(folder, number) for number in sorted(int(each) for each in numbers if each.isdecimal())]


def header_of(segment: Segment) -> SegmentHeader | None:
    """Return the header of a segment; None if it is incomplete or damaged.  Raises OSError, ValueError."""
    with segment.path.open("rb") as file:
        return segment_header(memoryview(file.read(SEGMENT_BYTES)))


def newest_epoch(folder: Path) -> int:
    """Return the largest run epoch in the headers of a folder's segments; 0 without one.  Raises OSError."""
    newest = 0
    for each in segments(folder):
        with suppress(ValueError):  # another format, which the recovery names
            if (header := header_of(each)) is not None:
                newest = max(newest, header.run_epoch)
    return newest


class Disk:
    """The calls to the operating system that a journal makes.  Tests replace them."""

    def create(self, path: Path) -> int:
        """Make a file that no other user can read, and return its descriptor.  Raises OSError if it exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        """Write buffers and return the number of bytes written, which may be fewer.  Raises OSError."""
        return os.writev(descriptor, buffers)

    def sync(self, descriptor: int) -> None:
        """Wait until a file or a folder is on the disk.  Raises OSError."""
        os.fdatasync(descriptor)

    def remove(self, path: Path) -> None:
        """Delete a file.  Raises OSError."""
        path.unlink(missing_ok=True)


class SegmentFile:
    """A segment that is being written.  Only the writer's thread uses it."""

    def __init__(self, disk: Disk, segment: Segment, header: SegmentHeader) -> None:
        """Make the file with its header, and wait until both are on the disk.  Raises OSError."""
        self._disk = disk
        self._descriptor = disk.create(segment.path)
        try:
            self.commit([header.packed()])
            for folder in (segment.path.parent, segment.path.parent.parent):  # the folder may be new as well
                self._sync_folder(folder)
        except BaseException:
            os.close(self._descriptor)
            raise

    def commit(self, buffers: Sequence[Buffer]) -> None:
        """Append buffers and wait until they are on the disk.  Raises OSError."""
        for start in range(0, len(buffers), _MOST_BUFFERS):
            self._write([memoryview(each).cast("B") for each in buffers[start : start + _MOST_BUFFERS]])
        self._disk.sync(self._descriptor)

    def close(self) -> None:
        """Close the file.  Raises OSError."""
        os.close(self._descriptor)

    def _write(self, buffers: list[memoryview]) -> None:
        buffers = [each for each in buffers if len(each)]
        while buffers:
            written = self._disk.write(self._descriptor, buffers)
            while buffers and written >= len(buffers[0]):
                written -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][written:]

    def _sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with where_known():
                self._disk.sync(descriptor)
        finally:
            os.close(descriptor)
