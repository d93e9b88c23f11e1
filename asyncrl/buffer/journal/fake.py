"""A journal without files, for tests on a virtual clock."""

from asyncrl.buffer.journal.records import Record, Snapshot


class MemoryJournal:
    """Keeps the records in a list; every record is durable at once.  Has the methods of ``Journal``."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.checkpoints: list[int] = []
        """Steps of ``checkpointed``."""
        self.problem: str | None = None

    def append(self, record: Record) -> int:
        """Keep a record and return its sequence number."""
        self.records.append(record)
        return len(self.records)

    async def durable(self, sequence: int) -> None:
        """Return at once."""

    def begin_segment(self, snapshot: Snapshot) -> int:
        """Keep the snapshot and return its sequence number."""
        return self.append(snapshot)

    def checkpointed(self, step: int) -> None:
        """Note the step."""
        self.checkpoints.append(step)

    async def close(self) -> None:
        """Do nothing."""
