"""The journal of a run: records of its events, written by a thread."""

from collections.abc import Callable
from pathlib import Path

from asyncrl.buffer.journal.records import Record, Snapshot


class Journal:
    """The journal of one run.  Not thread-safe: all methods are for the event loop's thread."""

    def __init__(self, folder: Path, run_epoch: int, *, delivered: Callable[[], int]) -> None:
        """Prepare a journal in ``folder``, which is made later.

        ``delivered`` returns the tokens delivered so far; the writer's thread calls it before each commit.
        """
        self._sequence = 0

    @property
    def problem(self) -> str | None:
        """The reason why the journal switched itself off; None while it is on."""
        return None

    def append(self, record: Record) -> int:
        """Queue a record and return its sequence number.  Costs microseconds."""
        self._sequence += 1
        return self._sequence

    async def durable(self, sequence: int) -> None:
        """Wait until the record is on the disk.  Returns at once if the journal is off."""

    def begin_segment(self, snapshot: Snapshot) -> None:
        """Write later records to a new segment, whose first record is ``snapshot``."""
        self.append(snapshot)

    def checkpointed(self, step: int) -> None:
        """Delete the segments that no recovery from the checkpoint of ``step`` or a later one needs."""

    async def close(self) -> None:
        """Write what waits, and end the thread."""
