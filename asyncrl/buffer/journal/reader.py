"""The records of a journal, read from its segments.

A segment may end with a torn commit only where its journal ended: it is the last one, or another journal begins after
it.  Anything else that fails its checksum is damage.
"""

import logging
import mmap
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from asyncrl.buffer.journal.frames import (
    FRAME_BYTES,
    MARKER,
    SEGMENT_BYTES,
    Frame,
    Kind,
    SegmentHeader,
    frame_at,
    skimmed,
)
from asyncrl.buffer.journal.groups import group_id_of, has_group_id
from asyncrl.buffer.journal.record_bytes import record_of
from asyncrl.buffer.journal.records import Record, Snapshot
from asyncrl.buffer.journal.segments import Segment, header_of, segments
from asyncrl.errors import JournalDamaged
from asyncrl.types import GroupId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSegment:
    """A segment with its bytes, as far as they count."""

    segment: Segment
    header: SegmentHeader
    data: memoryview
    may_be_torn: bool
    """Whether its journal ended in it."""
    num_uncounted: int
    """Files directly before it that do not count: refused, or without a header."""

    def snapshot(self) -> Snapshot | None:
        """Return the snapshot with which the segment begins; None if it begins with another record, or is torn."""
        frame = frame_at(self.data, SEGMENT_BYTES)
        if frame is None or frame.kind is not Kind.SNAPSHOT:
            return None
        record = self.record(frame)
        assert isinstance(record, Snapshot), "the kind is known"
        return record

    def frames_of(self, wanted: Kind, group_ids: Set[GroupId]) -> Iterator[Frame]:
        """Yield the ``Finished`` or ``Grown`` records of some groups.  Raises JournalDamaged if one is damaged."""
        for kind, start, stop in skimmed(self.data):
            body = self.data[start:stop]
            if kind == wanted and has_group_id(body) and group_id_of(body) in group_ids:
                frame = frame_at(self.data, start - FRAME_BYTES)
                if frame is None:
                    if self.may_be_torn:
                        return
                    raise self.damaged(start, "the record of a group is damaged")
                yield frame

    def frames(self) -> Iterator[Frame]:
        """Yield the frames in order, without those of a torn end.  Raises JournalDamaged."""
        at, expected = SEGMENT_BYTES, None
        while at < len(self.data):
            frame = frame_at(self.data, at)
            if frame is None or frame.run_epoch != self.header.run_epoch:
                self._check_torn(at)
                return
            if expected is not None and frame.sequence != expected - (frame.kind is Kind.DELIVERED):
                raise self.damaged(at, f"record {frame.sequence} follows record {expected - 1}")
            yield frame
            at, expected = frame.stop, frame.sequence + 1

    def damaged(self, at: int, text: str) -> JournalDamaged:
        """Return the error for a place in the file."""
        return JournalDamaged(text, str(self.segment.path), at)

    def record(self, frame: Frame) -> Record:
        """Return the record of a frame.  Raises JournalDamaged."""
        try:
            return record_of(frame.kind, frame.body)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            at = frame.stop - len(frame.body)
            raise self.damaged(at, f"a record of kind {frame.kind.name} has wrong values: {error!r:.200}") from error

    def _check_torn(self, at: int) -> None:
        """Raise JournalDamaged unless the bytes from ``at`` on can be a commit that was not finished."""
        if not self.may_be_torn:
            raise self.damaged(at, "a record is damaged or incomplete, and another segment follows")
        if _has_commit(self.data, at):
            raise self.damaged(at, "a record is damaged, and later ones are whole")
        text = "%s: the last %d bytes are an incomplete commit and do not count"
        logger.warning(text, self.segment.path, len(self.data) - at)


def read(folder: Path) -> Iterator[tuple[int, Record]]:
    """Yield the records of all segments in order, each with its sequence number, which begins anew in each journal.

    A torn end costs a warning.  Raises JournalDamaged, and FileNotFoundError if ``folder`` has no segment.
    """
    for each in opened(folder):
        for frame in each.frames():
            yield frame.sequence, each.record(frame)


def opened(folder: Path) -> list[OpenSegment]:
    """Return the segments that count, in order.

    A segment of an older run that follows one of a newer run is refused with a warning: its run had lost the folder.
    Raises JournalDamaged, and FileNotFoundError if ``folder`` has no segment.
    """
    found = segments(folder)
    if not found:
        raise FileNotFoundError(f"{folder} has no segment of a journal")
    headed = _without_refused([(each, _header(each)) for each in found])
    kept = list[OpenSegment]()
    numbers = [each.number for each in found]
    for place, (segment, header) in enumerate(headed):
        following = next((each for _, each in headed[place + 1 :] if each is not None), None)
        if header is None:
            _check_headless(segment, is_last=following is None or following.size_before is not None)
        else:
            last = kept[-1].segment.number if kept else 0
            num_uncounted = sum(last < number < segment.number for number in numbers)
            kept.append(_until_the_next(segment, header, following, num_uncounted))
    return kept


def groups_in(path: Path) -> tuple[set[GroupId], set[GroupId]]:
    """Return the groups with ``Finished`` records in a segment and those with ``Grown``, whatever their checksums.

    Raises OSError.
    """
    data = _mapped(path)
    found: dict[int, set[GroupId]] = {Kind.FINISHED: set(), Kind.GROWN: set()}
    for kind, start, stop in skimmed(data):
        if kind in found and has_group_id(data[start:stop]):
            found[kind].add(group_id_of(data[start:stop]))
    return found[Kind.FINISHED], found[Kind.GROWN]


type _Headed = tuple[Segment, SegmentHeader | None]


def _without_refused(headed: list[_Headed]) -> list[_Headed]:
    kept, newest = list[_Headed](), -1
    for segment, header in headed:
        if header is not None and header.run_epoch < newest:
            text = "%s: refused, because its run of epoch %d had lost the folder to one of epoch %d"
            logger.warning(text, segment.path, header.run_epoch, newest)
            continue
        newest = newest if header is None else header.run_epoch
        kept.append((segment, header))
    return kept


def _until_the_next(
    segment: Segment, header: SegmentHeader, following: SegmentHeader | None, num_uncounted: int
) -> OpenSegment:
    """Open a segment, without what its run wrote after another one had begun."""
    data = _mapped(segment.path)
    size = None if following is None else following.size_before
    if following is not None and size is not None and following.number == segment.number + 1:
        data = data[:size]
    ends = following is None or size is not None
    return OpenSegment(segment=segment, header=header, data=data, may_be_torn=ends, num_uncounted=num_uncounted)


def _header(segment: Segment) -> SegmentHeader | None:
    try:
        return header_of(segment)
    except ValueError as error:
        raise JournalDamaged(str(error), str(segment.path), 0) from error


def _check_headless(segment: Segment, *, is_last: bool) -> None:
    if not is_last:
        raise JournalDamaged("the header of the segment is damaged", str(segment.path), 0)
    logger.warning("%s: the segment was not finished and does not count", segment.path)


def _has_commit(data: memoryview, start: int) -> bool:
    """Return whether a commit begins behind ``start``: the one at ``start`` was then on the disk before."""
    rest = bytes(data[start:])
    at = rest.find(MARKER, 1)
    while at >= 0:
        frame = frame_at(data, start + at)
        if frame is not None and frame.kind is Kind.DELIVERED:
            return True
        at = rest.find(MARKER, at + 1)
    return False


def _mapped(path: Path) -> memoryview:
    """Return the bytes of a file, which are read when they are needed.  Raises OSError."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
