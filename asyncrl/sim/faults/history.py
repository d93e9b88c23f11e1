"""The oracle of recoveries: the truth at each record of a journal, and what a recovery must find.

    records of a process ──▶ its disk tears some ──▶ surviving history of the life ──▶ Expected of the next process

The truth is the ledger of the process that wrote the record, and the batches that it took.  The journal's own replay
is not used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from asyncrl.buffer.journal import (
    Admitted,
    Filtered,
    Finished,
    Grown,
    Left,
    LeftOut,
    PromptPlace,
    Record,
    Snapshot,
    Taken,
    Trained,
)
from asyncrl.buffer.journal.reader import opened
from asyncrl.metrics.facts import Gauges, GroupCounts, TokenCounts
from asyncrl.sim.faults.world.violation import Violation
from asyncrl.sim.faults.world.witness import Settled, Which
from asyncrl.types import Batch, GroupId, ScoredGroup

type Accounts = tuple[TokenCounts, GroupCounts]


@dataclass(slots=True, kw_only=True)
class Entry:
    """A record, with the truth when it was appended."""

    sequence: int
    record: Record
    accounts: Accounts
    """The ledger, without held tokens."""
    prompts_taken: int
    settled: Settled | None = None
    """Only with a snapshot."""
    buffered: frozenset[GroupId] = frozenset()
    """The groups that are finished and in no batch; only with a snapshot."""
    batch: Batch | None = None
    """Only with the record of a batch."""


def _like(found: GroupCounts, wanted: GroupCounts) -> GroupCounts:
    """Count buffered groups as partial, as far as ``wanted`` has fewer of the one and more of the other.

    A group that was interrupted while the journal wrote it is finished in the journal, and the recovery buffers it.
    """
    num_written = max(0, min(found.buffered - wanted.buffered, wanted.partial - found.partial))
    return replace(found, buffered=found.buffered - num_written, partial=found.partial + num_written)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The state in which a process must begin that recovers from a journal."""

    settled: Settled
    accounts: Accounts
    """The accounts but for ``lost``."""
    lost: tuple[int, int]
    """The fewest and the most tokens that count as lost."""
    prompts_taken: int
    batches: Mapping[int, Batch]
    """The batches to train again, by step."""
    kept: frozenset[GroupId]
    """The groups that must not be generated again."""

    def check(self, found: Gauges, prompts_taken: int) -> None:
        """Compare with the state of a scheduler that has just recovered.  Raises Violation."""
        tokens, groups = self.accounts
        pairs = (
            ("tokens", without_lost(found.tokens), tokens),
            ("groups", _like(found.groups, groups), groups),
            ("prompts taken", prompts_taken, self.prompts_taken),
        )
        for name, got, wanted in pairs:
            if got != wanted:
                raise Violation("recovered accounts", f"{name}: {got}, not {wanted}")
        if not self.lost[0] <= found.tokens.lost <= self.lost[1]:
            raise Violation("recovered accounts", f"{found.tokens.lost} tokens lost, not {self.lost}")


def without_lost(tokens: TokenCounts) -> TokenCounts:
    """Return the account without the number of lost tokens."""
    return TokenCounts(**{**_columns(tokens), "lost": 0})


def _columns(counts: Any) -> dict[str, int]:
    return {name: getattr(counts, name) for name in counts.__dataclass_fields__}


class Recording:
    """The records of one process, with the truth at each."""

    def __init__(
        self,
        look: Callable[[], tuple[Accounts, int]],
        settled: Callable[[], Settled],
        buffered: Callable[[], frozenset[GroupId]],
    ) -> None:
        """``look`` returns the accounts and the number of prompts taken, ``settled`` a copy of what is settled.

        ``buffered`` returns the groups that are finished and in no batch.
        """
        self.entries = list[Entry]()
        self._look = look
        self._settled = settled
        self._buffered = buffered

    def note(self, sequence: int, record: Record) -> None:
        """Note a record that was appended."""
        accounts, taken = self._look()
        entry = Entry(sequence=sequence, record=record, accounts=accounts, prompts_taken=taken)
        if isinstance(record, Snapshot):
            entry.settled, entry.buffered = self._settled(), self._buffered()
        self.entries.append(entry)

    def close_last(self) -> None:
        """Look again, because the accounts changed after their record was appended."""
        self.entries[-1].accounts, self.entries[-1].prompts_taken = self._look()

    def took(self, batch: Batch) -> None:
        """Note the batch that was recorded last, unless the journal is off."""
        for entry in reversed(self.entries):
            if isinstance(entry.record, Taken):
                if entry.record.step == batch.step:
                    entry.batch = batch
                return


@dataclass(slots=True)
class _Groups:
    """The groups of a history, by id."""

    places: dict[GroupId, Which] = field(default_factory=dict)
    in_flight: set[GroupId] = field(default_factory=set)
    finished: dict[GroupId, ScoredGroup] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    lengths: dict[GroupId, dict[int, int]] = field(default_factory=dict)
    """Tokens of each answer that was recorded in parts."""

    @property
    def num_grown(self) -> int:
        """Tokens of the groups in flight that a recovery has."""
        return sum(sum(self.lengths.get(group_id, {}).values()) for group_id in self.in_flight)

    def apply(self, entry: Entry) -> None:
        match entry.record:
            case Admitted(group_id=group_id, place=place):
                self.places[group_id] = _which(place)
                self.in_flight.add(group_id)
            case Grown(group_id=group_id, index=index, start=start, chunk=chunk):
                lengths = self.lengths.setdefault(group_id, {})
                if start <= lengths.get(index, 0):  # an answer that is generated again begins earlier
                    lengths[index] = start + len(chunk.token_ids)
            case Finished(group=group):
                self.in_flight.discard(group.group_id)
                self.finished[group.group_id] = group
            case Filtered(group_id=group_id) | Left(group_id=group_id):
                self.in_flight.discard(group_id)
                self.finished.pop(group_id, None)
            case Taken(step=step):
                assert entry.batch is not None, "each batch that was recorded was taken"
                self.batches[step] = entry.batch
            case Snapshot():
                self._interrupt_all_but(entry.buffered)

    def _interrupt_all_but(self, buffered: frozenset[GroupId]) -> None:
        """Note the groups that were interrupted while the journal wrote them: at a snapshot, they are in flight."""
        taken = {group.group_id for batch in self.batches.values() for group in batch.groups}
        for group_id in self.finished.keys() - buffered - taken:
            del self.finished[group_id]
            self.in_flight.add(group_id)


class History:
    """The records that survived on the disk of a life, in order."""

    def __init__(self) -> None:
        self._entries = list[Entry]()
        self._most_delivered = 0
        """Tokens that were delivered to the process with the last entry, up to its end."""

    def survive(self, entries: list[Entry], folder: Path, run_epoch: int, num_durable: int, delivered: int) -> None:
        """Add the records of a process that has ended, as far as its disk has them.  Raises Violation."""
        last = _last_sequence(folder, run_epoch)
        if last < num_durable:
            raise Violation("durable records survive", f"{num_durable} were durable, and the journal has {last}")
        kept = [entry for entry in entries if entry.sequence <= last]
        if kept:
            self._entries += kept
            self._most_delivered = delivered

    def forget(self) -> None:
        """Forget all, because a process resumes from its checkpoint alone."""
        self._entries.clear()

    def expected(self, step: int, mark: str) -> Expected | None:
        """Return what a recovery from the checkpoint of ``step`` must find; None if the journal lacks it."""
        base = self._base(step, mark)
        if base is None:
            return None
        groups, settled = _Groups(), Settled()
        for place, entry in enumerate(self._entries):
            groups.apply(entry)
            if place == base and entry.settled is not None:
                settled = entry.settled.copy()
            if place > base:
                _settle(entry.record, groups, settled)
        return self._expected(base, step, groups, settled)

    def _expected(self, base: int, step: int, groups: _Groups, settled: Settled) -> Expected:
        batches = {number: batch for number, batch in groups.batches.items() if number >= step}
        done = {group.group_id for number, batch in groups.batches.items() if number < step for group in batch.groups}
        held = [group for group_id, group in groups.finished.items() if group_id not in done]
        first, last = self._entries[base].accounts, self._entries[-1].accounts
        skipped = self._skipped_since(base, groups)
        closed = _columns(last[0]) | {
            "trained": first[0].trained,
            "masked": first[0].masked,
            "failed": last[0].failed - sum(group.num_tokens for group in skipped),
            "held": sum(group.num_tokens for group in held) + groups.num_grown,
            "lost": 0,
        }
        names = ("trained", "masked", "filtered", "stale", "failed", "held")
        closed["generated"] = sum(closed[name] for name in names)
        counts = _columns(last[1]) | {
            "trained": first[1].trained,
            "failed": last[1].failed - len(skipped),
            "partial": len(groups.in_flight),
            "in_flight": 0,
            "buffered": len(held),
            "training": 0,
        }
        since = [entry for entry in self._entries[base + 1 :] if not isinstance(entry.record, Snapshot)]
        fewest = max(entry.accounts[0].generated for entry in (self._entries[base], *since))
        lost = [max(0, most - closed["generated"]) for most in (fewest, self._most_delivered)]
        return Expected(
            settled=settled,
            accounts=(TokenCounts(**closed), GroupCounts(**counts)),
            lost=(first[0].lost + lost[0], first[0].lost + lost[1]),
            prompts_taken=self._entries[-1].prompts_taken,
            batches=batches,
            kept=frozenset(groups.finished),
        )

    def _base(self, step: int, mark: str) -> int | None:
        for place in reversed(range(len(self._entries))):
            record = self._entries[place].record
            if isinstance(record, Snapshot) and record.step == step and record.state["mark"] == mark:
                return place
        return None

    def _skipped_since(self, base: int, groups: _Groups) -> list[ScoredGroup]:
        """Return the groups that failed with their step: the step is trained again."""
        steps = [
            entry.record.step
            for entry in self._entries[base:]
            if isinstance(entry.record, Trained) and entry.record.is_skipped
        ]
        return [group for step in steps for group in groups.batches[step].groups]


def _settle(record: Record, groups: _Groups, settled: Settled) -> None:
    """Settle the prompt that a record settles.  Those of batches are not: their steps are trained again."""
    match record:
        case Filtered(group_id=group_id):
            settled.add(groups.places[group_id], "filtered")
        case Left(group_id=group_id, outcome="failed"):
            settled.add(groups.places[group_id], "failed")
        case LeftOut(place=place):
            settled.add(_which(place), "failed")


def _which(place: PromptPlace) -> Which:
    return place.epoch, place.row


def _last_sequence(folder: Path, run_epoch: int) -> int:
    try:
        found = opened(folder)
    except FileNotFoundError:
        return 0
    own = (each for each in found if each.header.run_epoch == run_epoch)
    return max((frame.sequence for each in own for frame in each.frames()), default=0)
