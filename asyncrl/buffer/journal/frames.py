"""The bytes around records: the header of a segment, and the frame of each record.

segment   magic 8 | format u16 | - u16 | run epoch u32 | number u32 | - u32 | size before u64 | checksum u32
frame     marker 4 | length u32 | checksum u32 | run epoch u32 | sequence u64 | kind u8 | body
"""

import enum
import struct
from collections.abc import Buffer, Iterator, Sequence
from dataclasses import dataclass

import xxhash

FORMAT_VERSION = 1
MARKER = b"\xa5jr\n"
"""Begins each frame, so that the frames behind a damaged one are found."""
_MAGIC = b"ARLJRNL\n"
_SEGMENT = struct.Struct("<8sHHIIIQ")
_CHECKSUM = struct.Struct("<I")
_CONTINUES = 2**64 - 1
"""``size before`` of a segment that the same journal continues in."""
_FRAME = struct.Struct("<4sIIIQB")
_CHECKED = struct.Struct("<IIQB")
"""The fields of a frame that its checksum covers, followed by the body."""

SEGMENT_BYTES = _SEGMENT.size + _CHECKSUM.size
FRAME_BYTES = _FRAME.size
LONGEST_BODY = 2**32 - 1


class Kind(enum.IntEnum):
    """The kinds of records.  The numbers are in files and never change."""

    SNAPSHOT = 1
    ADMITTED = 2
    FINISHED = 3
    FILTERED = 4
    LEFT = 5
    LEFT_OUT = 6
    WASTED = 7
    TAKEN = 8
    TRAINED = 9
    PUBLISHED = 10
    EVALUATED = 11
    DELIVERED = 12
    GROWN = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The first bytes of a segment."""

    run_epoch: int
    number: int
    """Number of the segment, from 1."""
    size_before: int | None
    """Bytes of the segment before, if a new journal begins here; 0 without one.  None: the same journal continues."""

    def packed(self) -> bytes:
        """Return the bytes of the header."""
        before = _CONTINUES if self.size_before is None else self.size_before
        start = _SEGMENT.pack(_MAGIC, FORMAT_VERSION, 0, self.run_epoch, self.number, 0, before)
        return start + _CHECKSUM.pack(_digest((start,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One record, not decoded."""

    run_epoch: int
    sequence: int
    kind: Kind
    body: memoryview
    stop: int
    """Offset behind the frame in its file."""


def segment_header(data: memoryview) -> SegmentHeader | None:
    """Return the header of a segment; None if it is incomplete or damaged.  Raises ValueError for another format."""
    if len(data) < SEGMENT_BYTES or not any(data[:SEGMENT_BYTES]):  # file systems may leave zeros
        return None
    magic, version, _, run_epoch, number, _, before = _SEGMENT.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no segment of a journal")
    if version != FORMAT_VERSION:
        raise ValueError(f"format {version}, and this version of asyncrl reads {FORMAT_VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(data, _SEGMENT.size)
    if checksum != _digest((data[: _SEGMENT.size],)):
        return None
    return SegmentHeader(run_epoch=run_epoch, number=number, size_before=None if before == _CONTINUES else before)


def framed(run_epoch: int, sequence: int, kind: Kind, body: Sequence[Buffer]) -> list[Buffer]:
    """Return the buffers of a record with its frame.  Raises ValueError if the body is too long."""
    length = sum(memoryview(each).nbytes for each in body)
    if length > LONGEST_BODY:
        raise ValueError(f"a record has {length} bytes, more than {LONGEST_BODY}")
    checksum = _digest((_CHECKED.pack(length, run_epoch, sequence, kind), *body))
    return [_FRAME.pack(MARKER, length, checksum, run_epoch, sequence, kind), *body]


def frame_at(data: memoryview, start: int) -> Frame | None:
    """Return the frame at an offset; None if it is incomplete or damaged."""
    if len(data) < start + FRAME_BYTES:
        return None
    marker, length, checksum, run_epoch, sequence, kind = _FRAME.unpack_from(data, start)
    stop = start + FRAME_BYTES + length
    if marker != MARKER or len(data) < stop or kind not in _KINDS:
        return None
    body = data[stop - length : stop]
    if checksum != _digest((_CHECKED.pack(length, run_epoch, sequence, kind), body)):
        return None
    return Frame(run_epoch=run_epoch, sequence=sequence, kind=Kind(kind), body=body, stop=stop)


_KINDS = frozenset(Kind)


def _digest(parts: Sequence[Buffer]) -> int:
    """Return 32 bits of XXH3 over all parts."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest() & 0xFFFFFFFF


def skimmed(data: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield the kind of each frame, and where its body starts and stops, without a look at the checksums."""
    at = SEGMENT_BYTES
    while len(data) >= at + FRAME_BYTES:
        marker, length, *_, kind = _FRAME.unpack_from(data, at)
        start = at + FRAME_BYTES
        at = start + length
        if marker != MARKER or len(data) < at:
            return
        yield kind, start, at
