"""The whole journal of a run, with the segments that the run deletes, and where it ended at each kill."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.buffer.journal import Admitted, Filtered, Finished, Left, Record, Snapshot, Taken
from asyncrl.buffer.journal.reader import opened
from asyncrl.buffer.journal.segments import segments

type Place = tuple[int, int]
"""Number of a segment, and the offset behind a record in it."""
type Mark = Mapping[int, int]
"""The bytes of each segment at one moment."""


class Keeper:
    """Hard links to the segments of a journal: the files stay when the run deletes its own names of them."""

    def __init__(self, journal: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = journal
        self._linked: set[str] = set()
        self.folder = folder

    def look(self) -> None:
        """Link the segments that are new."""
        for segment in segments(self._journal):
            if segment.path.name not in self._linked:
                with suppress(FileNotFoundError):  # deleted by now
                    os.link(segment.path, self.folder / segment.path.name)
                    self._linked.add(segment.path.name)

    def mark(self) -> dict[int, int]:
        """Return where the journal ends now."""
        self.look()
        return {segment.number: segment.path.stat().st_size for segment in segments(self.folder)}


def is_before(place: Place, mark: Mark) -> bool:
    """Whether the record that ends at ``place`` was whole in the file at ``mark``."""
    number, stop = place
    return stop <= mark.get(number, 0)


@dataclass(frozen=True, slots=True)
class History:
    """The records of a journal by what they are about, each with its place."""

    admitted: dict[int, list[tuple[Place, Admitted]]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, list[tuple[Place, Finished]]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[int, list[tuple[Place, Filtered | Left]]] = field(default_factory=lambda: defaultdict(list))
    """Groups that a filter dropped, that were too old, or failed."""
    taken: dict[int, list[tuple[Place, tuple[int, ...]]]] = field(default_factory=lambda: defaultdict(list))
    """The groups of each step's batch, by step."""
    snapshots: list[tuple[Place, Snapshot]] = field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[tuple[Place, Record]]) -> "History":
        """Sort the records of a journal."""
        history = cls()
        for place, record in records:
            match record:
                case Admitted():
                    history.admitted[record.group_id].append((place, record))
                case Finished():
                    history.finished[record.group.group_id].append((place, record))
                case Filtered() | Left():
                    history.ended[record.group_id].append((place, record))
                case Taken():
                    history.taken[record.step].append((place, tuple(record.group_ids)))
                case Snapshot():
                    history.snapshots.append((place, record))
                case _:
                    continue
        return history

    def trained(self, num_steps: int) -> dict[int, int]:
        """Return the step that trained each group: the last batches of the steps before ``num_steps`` count."""
        batches = {step: found[-1][1] for step, found in self.taken.items() if step < num_steps}
        return {group_id: step for step, group_ids in batches.items() for group_id in group_ids}

    def in_flight(self, mark: Mark) -> set[int]:
        """Return the groups that had started at ``mark``, and neither finished nor ended."""
        started, over = _ids(self.admitted, mark), _ids(self.finished, mark) | _ids(self.ended, mark)
        return started - over


def read(folder: Path) -> tuple[History, tuple[int, ...]]:
    """Return the history in a folder of segments, and the numbers of the missing ones.  Raises JournalDamaged."""
    found = opened(folder)
    records = [((each.segment.number, frame.stop), each.record(frame)) for each in found for frame in each.frames()]
    numbers = {each.number for each in segments(folder)}
    missing = tuple(sorted(set(range(1, max(numbers) + 1)) - numbers))
    return History.of(records), missing


def _ids[T](records: Mapping[int, list[tuple[Place, T]]], mark: Mark) -> set[int]:
    return {group_id for group_id, found in records.items() if any(is_before(place, mark) for place, _ in found)}
