"""The thread that writes a journal.

    queue ──▶ bytes, with pauses for the event loop ──▶ one write and one fdatasync per commit ──▶ told to the loop

A commit holds the records of ``COMMIT_S`` seconds, or of ``COMMIT_BYTES``.  Its first record is ``Delivered``, except
where a segment begins.  A reader can thus tell a torn end, which only the last commit can have, from damage.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from asyncrl.buffer.journal.frames import SegmentHeader, framed
from asyncrl.buffer.journal.reader import groups_in
from asyncrl.buffer.journal.record_bytes import KINDS, RecordWriter
from asyncrl.buffer.journal.records import Delivered, Finished, Grown, Record, Snapshot
from asyncrl.buffer.journal.retention import Retention
from asyncrl.buffer.journal.segments import Disk, SegmentFile, header_of, segment_of, segments
from asyncrl.errors import first_line
from asyncrl.types import Chunk, GroupId, Sample
from asyncrl.unhurried import unhurried

logger = logging.getLogger(__name__)

COMMIT_S = 0.5
"""Seconds from the first record of a commit to its write, unless the loop is in a hurry."""
COMMIT_BYTES = 1 << 20
"""Bytes of a commit that is written at once."""
IDLE_S = 1.0
"""Seconds without records after which a changed number of delivered tokens is written alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """Asks for the deletion of segments, once everything before it is on the disk."""

    step: int


class End:
    """Ends the thread, once everything before it is on the disk."""


class Fenced(Exception):
    """Another run with a newer epoch writes to the folder."""


def estimated_bytes(record: Finished | Grown) -> int:
    """Return about the number of bytes of a record: its tokens, routes and texts."""
    if isinstance(record, Grown):
        return _column_bytes(record.chunk)
    return sum(_column_bytes(scored.sample) + len(scored.sample.text) for scored in record.group.samples)


def _column_bytes(tokens: Chunk | Sample) -> int:
    return 8 * len(tokens.token_ids) + (0 if tokens.routes is None else tokens.routes.experts_NLK.nbytes)


type Item = tuple[int, Record | Checkpointed | End]


class JournalWriter:
    """The writer's side of a journal.

    Invariants: the event loop's thread only appends to ``queue``, sets ``wake`` and ``due``, and adds to
    ``num_queued``.  Everything else here belongs to the writer's thread, but for ``synced`` and ``is_off``, which any
    thread may read.
    """

    def __init__(
        self,
        folder: Path,
        run_epoch: int,
        *,
        delivered: Callable[[], int],
        on_commit: Callable[[], None],
        disk: Disk,
    ) -> None:
        """``on_commit`` is called in the thread after each commit."""
        self.queue = deque[Item]()
        self.wake = Event()
        self.due = Event()
        """Ends the wait for more records of a commit: it is full, or the loop is in a hurry."""
        self.num_queued = 0
        """Estimated bytes of all groups that were ever queued; only the event loop's thread changes it."""
        self._num_converted = 0
        """The same of those converted; only the writer's thread changes it."""
        self.synced = 0
        """The largest sequence number that is on the disk."""
        self.is_off = False
        """Whether the thread must end without writing more."""
        self._folder = folder
        self._run_epoch = run_epoch
        self._delivered = delivered
        self._on_commit = on_commit
        self._disk = disk
        self._retention = Retention()
        self._file: SegmentFile | None = None
        self._number = 0
        self._buffers: list[Any] = []
        self._num_bytes = 0
        self._encoded = 0
        """The largest sequence number among the encoded records."""
        self._last_delivered: int | None = None
        self._finished: list[GroupId] = []
        self._grown: list[GroupId] = []
        self._warned: set[str] = set()
        self._is_behind = False
        """Whether the last commit was full before it had all records."""
        self._is_ending = False

    def run(self) -> None:
        """Write until ``End``.  Raises OSError, Fenced, or the error of a record that cannot be written."""
        try:
            while not self._is_ending and not self.is_off:
                if not self.queue:  # a full commit leaves records behind
                    self.wake.wait(IDLE_S)
                self._gather()
                if not self.is_off:
                    self._commit()
        finally:
            if self._file is not None:
                self._file.close()

    # ---- from the queue to bytes

    def _gather(self) -> None:
        """Wait until a commit is due, and convert its records."""
        self.wake.clear()
        if self.queue:
            if not self._is_at_once:
                self.due.wait(COMMIT_S)
            # Invariant: cleared before the queue is read, so a record whose writer set it is in this commit, or the
            # event is set for the next one, or a full commit left the record behind and the next one does not wait.
            self.due.clear()
        for _ in unhurried(self._steps()):
            pass

    @property
    def _is_at_once(self) -> bool:
        """Whether a commit is due without a wait for more records."""
        return self._is_behind or self.num_queued - self._num_converted >= COMMIT_BYTES

    @property
    def _is_full(self) -> bool:
        return self._num_bytes >= COMMIT_BYTES or self._is_ending or self.is_off

    def _steps(self) -> Iterator[None]:
        """Convert what is queued, at most until a commit is full.  Yields between steps of work."""
        while self.queue and not self._is_full:
            sequence, item = self.queue.popleft()
            match item:
                case End():
                    self._is_ending = True
                case Checkpointed(step=step):
                    self._commit()
                    yield from self._delete(step)
                case Snapshot():
                    yield from self._begin_segment(sequence, item)
                case _:
                    yield from self._encode(sequence, item)
            if isinstance(item, Finished | Grown):
                group_id = item.group_id if isinstance(item, Grown) else item.group.group_id
                (self._grown if isinstance(item, Grown) else self._finished).append(group_id)
                self._num_converted += estimated_bytes(item)
            del item  # an idle thread keeps no group alive
        self._is_behind = bool(self.queue)

    def _encode(self, sequence: int, record: Record) -> Iterator[None]:
        body = RecordWriter(record, self._note_left_out)
        yield from body.steps()
        if not self._buffers and not isinstance(record, Snapshot):
            self._add_delivered()
        self._add(sequence, record, body.buffers())
        yield

    def _add(self, sequence: int, record: Record, body: list[Any]) -> None:
        buffers = framed(self._run_epoch, sequence, KINDS[type(record)], body)
        self._buffers += buffers
        self._num_bytes += sum(memoryview(each).nbytes for each in buffers)
        self._encoded = sequence

    def _add_delivered(self) -> None:
        """Begin a commit.  Its sequence number is that of the record before."""
        self._last_delivered = self._delivered()
        body = RecordWriter(Delivered(num_tokens=self._last_delivered), self._note_left_out)
        for _ in body.steps():
            pass
        self._add(self._encoded, Delivered(num_tokens=self._last_delivered), body.buffers())

    def _note_left_out(self, names: list[str]) -> None:
        if new := sorted(set(names) - self._warned):
            self._warned.update(new)
            text = "%s: values that JSON does not have are missing in the journal, and in groups after a restart: %s"
            logger.warning(text, self._folder, ", ".join(new))

    # ---- from bytes to the disk

    def _commit(self) -> None:
        """Write what was converted, and tell the loop.  A changed number of delivered tokens suffices for a commit."""
        if not self._buffers and (self._file is None or self._delivered() == self._last_delivered):
            return
        if not self._buffers:
            self._add_delivered()
        self._opened().commit(self._buffers)
        self._retention.note(self._number, self._finished, self._grown)
        self._buffers, self._num_bytes, self._finished, self._grown = [], 0, [], []
        self.synced = self._encoded
        self._on_commit()

    def _begin_segment(self, sequence: int, snapshot: Snapshot) -> Iterator[None]:
        """Commit what belongs to the segment before, and write the snapshot alone."""
        if self._buffers:
            self._commit()
        if self._file is not None:
            self._file.close()
        is_first, self._file = self._file is None, None
        yield from self._encode(sequence, snapshot)
        self._open(is_first=is_first)
        self._retention.note_snapshot(self._number, snapshot)
        self._commit()

    def _opened(self) -> SegmentFile:
        if self._file is None:
            self._open(is_first=True)
        assert self._file is not None, "a segment was opened"
        return self._file

    def _open(self, *, is_first: bool) -> None:
        """Make the next segment.  Raises Fenced if a newer run has one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found = segments(self._folder)
        for each in reversed(found):
            if (header := header_of(each)) is not None and header.run_epoch > self._run_epoch:
                raise Fenced(f"a run of epoch {header.run_epoch} writes there, and this one has {self._run_epoch}")
        if is_first:
            for each in found:
                self._retention.add(each.number)
                self._retention.note(each.number, *groups_in(each.path))
        size = found[-1].path.stat().st_size if found else 0
        self._number = found[-1].number + 1 if found else 1
        header = SegmentHeader(run_epoch=self._run_epoch, number=self._number, size_before=size if is_first else None)
        self._file = SegmentFile(self._disk, segment_of(self._folder, self._number), header)
        self._retention.add(self._number)

    def _delete(self, step: int) -> Iterator[None]:
        """Delete the segments that no recovery needs.  One that cannot be deleted costs disk space and a warning."""
        for number in self._retention.dispensable(step):
            path = segment_of(self._folder, number).path
            try:
                self._disk.remove(path)
            except OSError as error:
                logger.warning("%s: not deleted: %s", path, first_line(error))
            self._retention.remove(number)
            yield
