"""The segments that a recovery may still need.

A recovery reads the segment of its snapshot and all later ones.  Of the earlier ones it needs those with the content of
groups that were buffered at the snapshot, and those with tokens of groups that were in flight.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from asyncrl.buffer.journal.records import Snapshot
from asyncrl.types import GroupId


@dataclass(slots=True, kw_only=True)
class _Content:
    """The content of a segment, as far as it matters here."""

    finished: set[GroupId] = field(default_factory=set)
    grown: set[GroupId] = field(default_factory=set)
    """The groups whose tokens in flight it has."""
    step: int | None = None
    """Step of its snapshot; None without one."""
    buffered: frozenset[GroupId] = frozenset()
    """The groups that were buffered at the snapshot."""
    in_flight: frozenset[GroupId] = frozenset()
    """The groups that were in flight at the snapshot."""


class Retention:
    """The segments on the disk, by number.  Only the writer's thread uses it."""

    def __init__(self) -> None:
        self._segments: dict[int, _Content] = {}

    def add(self, number: int) -> None:
        """Add a new segment, which is the last one."""
        self._segments[number] = _Content()

    def note(self, number: int, finished: Iterable[GroupId], grown: Iterable[GroupId]) -> None:
        """Note the groups whose content a segment has, and those whose tokens in flight it has."""
        self._segments[number].finished.update(finished)
        self._segments[number].grown.update(grown)

    def note_snapshot(self, number: int, snapshot: Snapshot) -> None:
        """Note the snapshot of a segment."""
        content = self._segments[number]
        content.step = snapshot.step
        content.buffered = frozenset(held.group_id for held in snapshot.held if held.is_buffered)
        content.in_flight = frozenset(held.group_id for held in snapshot.held) - content.buffered

    def dispensable(self, step: int) -> list[int]:
        """Return the segments that no recovery from ``step`` or later needs; none if there is no such snapshot."""
        bases = [number for number, content in self._segments.items() if content.step == step]
        if not bases:
            return []
        base = bases[-1]
        later = [content for number, content in self._segments.items() if number >= base]
        in_flight = frozenset[GroupId]().union(*(content.in_flight for content in later))
        found = self._without(base, frozenset[GroupId]().union(*(content.buffered for content in later)))
        return [number for number in found if not self._segments[number].grown & in_flight]

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
