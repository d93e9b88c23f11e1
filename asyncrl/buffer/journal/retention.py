"""The segments that a recovery may still need.

A recovery reads the segment of its snapshot and all later ones.  Of the earlier ones it needs those with the content of
groups that were buffered at the snapshot.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from asyncrl.buffer.journal.records import Snapshot
from asyncrl.types import GroupId


@dataclass(slots=True, kw_only=True)
class _Content:
    """The content of a segment, as far as it matters here."""

    finished: set[GroupId] = field(default_factory=set)
    step: int | None = None
    """Step of its snapshot; None without one."""
    buffered: frozenset[GroupId] = frozenset()
    """The groups that were buffered at the snapshot."""


class Retention:
    """The segments on the disk, by number.  Only the writer's thread uses it."""

    def __init__(self) -> None:
        self._segments: dict[int, _Content] = {}

    def add(self, number: int) -> None:
        """Add a new segment, which is the last one."""
        self._segments[number] = _Content()

    def note_finished(self, number: int, group_ids: Iterable[GroupId]) -> None:
        """Note the groups whose content a segment has."""
        self._segments[number].finished.update(group_ids)

    def note_snapshot(self, number: int, snapshot: Snapshot) -> None:
        """Note the snapshot of a segment."""
        content = self._segments[number]
        content.step = snapshot.step
        content.buffered = frozenset(held.group_id for held in snapshot.held if held.is_buffered)

    def dispensable(self, step: int) -> list[int]:
        """Return the segments that no recovery from ``step`` or later needs; none if there is no such snapshot."""
        bases = [number for number, content in self._segments.items() if content.step == step]
        if not bases:
            return []
        base = bases[-1]
        needed: set[GroupId] = set()
        for number, content in self._segments.items():
            if number >= base:
                needed |= content.buffered
        return self._without(base, needed)

    def remove(self, number: int) -> None:
        """Forget a segment that was deleted."""
        del self._segments[number]

    def _without(self, base: int, needed: Set[GroupId]) -> list[int]:
        """Return the segments before ``base`` that have the last content of no group of ``needed``."""
        missing, found = set(needed), list[int]()
        for number in sorted((each for each in self._segments if each < base), reverse=True):
            has = missing & self._segments[number].finished
            missing -= has
            if not has:
                found.append(number)
        return found[::-1]
