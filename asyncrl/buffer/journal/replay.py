"""The state of a run, from the snapshot of a checkpoint and the records after it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.journal.frames import Frame, Kind
from asyncrl.buffer.journal.groups import group_id_of
from asyncrl.buffer.journal.reader import OpenSegment
from asyncrl.buffer.journal.records import (
    Admitted,
    Delivered,
    Evaluated,
    Filtered,
    Finished,
    Grown,
    Left,
    LeftOut,
    PromptPlace,
    Published,
    Record,
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.types import Batch, GroupId, JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Events after the snapshot.  Together with its state they restore the accounts.

    The groups of recorded batches are in no count but ``admitted``: they are trained again.
    """

    admitted: int = 0
    """Groups that were started for the first time."""
    filtered: int = 0
    filtered_tokens: int = 0
    stale: int = 0
    stale_tokens: int = 0
    """Tokens of stale groups, without ``wasted``."""
    failed: int = 0
    failed_tokens: int = 0
    observed_tokens: int = 0
    """Tokens of observations in groups that were dropped after their score."""
    left_out: int = 0
    """Prompts of rows in quarantine."""
    wasted: int = 0
    """Tokens that arrived late; they count as stale."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Groups that filters dropped, by reason, in order of the first."""
    verdicts: tuple[bool, ...] = ()
    """The filter's verdicts in order; True if it kept the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The state of a run at the end of its journal, with a checkpoint as its beginning."""

    step: int
    """The checkpoint's step."""
    state: Mapping[str, JsonValue]
    """The state of the snapshot."""
    batches: tuple[Batch, ...]
    """The recorded batches of the steps from ``step`` on, in order, trained or not.

    The groups are as they were finished: masks for old tokens, and changes by hooks, must be made again.
    """
    skipped: frozenset[int]
    """Steps that were recorded as skipped."""
    trained: frozenset[int]
    """Steps that were recorded as trained, skipped ones included."""
    buffered: tuple[Finished, ...]
    """The groups that wait for a batch, oldest dispatch first."""
    in_flight: tuple[Admitted, ...]
    """The groups that were neither finished nor left, in order of their ids.

    A group of the snapshot has 0 ``prompts_taken`` and no ``last_taken``.
    """
    growth: Mapping[GroupId, tuple[Grown, ...]]
    """The recorded tokens of groups in flight, in order; a group without any is left out."""
    returned: tuple[PromptPlace, ...]
    """Prompts that were returned after the snapshot and have not started again, in order."""
    started: tuple[PromptPlace, ...]
    """Prompts that started after the snapshot, or were left out, and had not been returned after it.

    They came from the source or from the prompts that the snapshot's state has as returned.
    """
    counts: Counts
    next_group_id: GroupId | None
    """The id after the largest one admitted since the snapshot; None: none was."""
    prompts_taken: int | None
    """Prompts taken from the source, as recorded last; None: none since the snapshot."""
    last_taken: tuple[int, int] | None
    published: Published | None
    """The version published last; None: none since the snapshot."""
    evaluated: tuple[Evaluated, ...]
    """Evaluations that ended since the snapshot."""
    delivered: int | None
    """Tokens delivered in all, as recorded last; None: not since the snapshot."""
    num_torn_bytes: int = 0
    """Bytes of incomplete records at the end of the journal, which were ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A ``Finished`` or ``Grown`` record that is not decoded yet."""

    segment: OpenSegment
    frame: Frame

    def finished(self) -> Finished:
        """Return the record.  Raises JournalDamaged."""
        record = self.segment.record(self.frame)
        assert isinstance(record, Finished), "the kind was looked at"
        return record

    def grown(self) -> Grown:
        """Return the record of tokens.  Raises JournalDamaged."""
        record = self.segment.record(self.frame)
        assert isinstance(record, Grown), "the kind was looked at"
        return record


class Replay:
    """The state after the records so far.  Contents of groups are decoded when they are asked for."""

    def __init__(
        self,
        snapshot: Snapshot,
        contents: Mapping[GroupId, Content],
        growth: Mapping[GroupId, list[Content]],
    ) -> None:
        """Begin with ``snapshot``; ``contents`` has the groups that were buffered then.  KeyError if one lacks.

        ``growth`` has the tokens of the groups that were in flight.
        """
        self._growth = {group_id: list(found) for group_id, found in growth.items()}
        self.snapshot = snapshot
        self.num_torn_bytes = 0
        self.steps_done = snapshot.step
        self.in_flight: dict[GroupId, Admitted] = {}
        self.buffered: dict[GroupId, Content] = {}
        self.batches: dict[int, dict[GroupId, Content]] = {}
        self._places: dict[GroupId, PromptPlace] = {}
        self._skipped: set[int] = set()
        self._trained: set[int] = set()
        self._returned: list[PromptPlace] = []
        self._started: list[PromptPlace] = []
        self._verdicts: dict[GroupId, bool] = {}
        self._numbers = dict.fromkeys(_NUMBERS, 0)
        self._reasons: dict[str, int] = {}
        self._next_id: GroupId | None = None
        self._prompts_taken: int | None = None
        self._last_taken: tuple[int, int] | None = None
        self._published: Published | None = None
        self._evaluated: list[Evaluated] = []
        self._delivered: int | None = None
        self._apply: Mapping[type[Record], Callable[[Any], None]] = {
            Admitted: self._admit,
            LeftOut: self._leave_out,
            Filtered: self._filter,
            Left: self._leave,
            Trained: self._train,
            Wasted: self._waste,
            Published: self._publish,
            Evaluated: self._evaluate,
            Delivered: self._deliver,
        }
        for held in snapshot.held:
            self._places[held.group_id] = held.place
            if held.is_buffered:
                self.buffered[held.group_id] = contents[held.group_id]
            else:
                self.in_flight[held.group_id] = Admitted(
                    group_id=held.group_id, place=held.place, prompts_taken=0, last_taken=None
                )
        for taken in snapshot.pending:
            self.batches[taken.step] = {group_id: self.buffered.pop(group_id) for group_id in taken.group_ids}

    def apply(self, segment: OpenSegment, frame: Frame) -> None:
        """Apply the next record.  Raises JournalDamaged."""
        if frame.kind is Kind.GROWN:
            self._growth.setdefault(group_id_of(frame.body), []).append(Content(segment=segment, frame=frame))
            return
        if frame.kind is Kind.FINISHED:
            self._finish(group_id_of(frame.body), Content(segment=segment, frame=frame))
            return
        record = segment.record(frame)
        if isinstance(record, Taken):
            self._take(record, segment, frame)
        elif (apply := self._apply.get(type(record))) is not None:
            apply(record)

    def recovered(self) -> Recovered:
        """Return the state.  Raises JournalDamaged."""
        return Recovered(
            step=self.snapshot.step,
            state=self.snapshot.state,
            batches=tuple(self.batch(step) for step in sorted(self.batches)),
            skipped=frozenset(self._skipped),
            trained=frozenset(self._trained),
            buffered=self._oldest_first(),
            in_flight=tuple(self.in_flight[group_id] for group_id in sorted(self.in_flight)),
            growth={
                group_id: tuple(content.grown() for content in found)
                for group_id, found in self._growth.items()
                if found and group_id in self.in_flight
            },
            returned=tuple(self._returned),
            started=tuple(self._started),
            counts=Counts(**self._numbers, reasons=self._reasons, verdicts=tuple(self._verdicts.values())),
            next_group_id=self._next_id,
            prompts_taken=self._prompts_taken,
            last_taken=self._last_taken,
            published=self._published,
            evaluated=tuple(self._evaluated),
            delivered=self._delivered,
            num_torn_bytes=self.num_torn_bytes,
        )

    def batch(self, step: int) -> Batch:
        """Return the recorded batch of a step.  Raises JournalDamaged, and KeyError if there is none."""
        return Batch(step=step, groups=tuple(each.finished().group for each in self.batches[step].values()))

    def _oldest_first(self) -> tuple[Finished, ...]:
        """Return the buffered groups in order of their dispatches; numbers of dispatches begin anew in each run."""
        found = [(each.frame.run_epoch, each.finished()) for each in self.buffered.values()]
        found.sort(key=lambda each: (each[1].dispatch.deadline, each[0], each[1].dispatch.order))
        return tuple(finished for _, finished in found)

    # ---- one record

    def _admit(self, record: Admitted) -> None:
        if record.group_id not in self._places:
            self._numbers["admitted"] += 1
            self._start(record.place)
        self._places[record.group_id] = record.place
        self.in_flight[record.group_id] = record
        self._next_id = GroupId(max(self._next_id or 0, record.group_id + 1))
        self._prompts_taken, self._last_taken = record.prompts_taken, record.last_taken

    def _leave_out(self, record: LeftOut) -> None:
        self._numbers["left_out"] += 1
        self._start(record.place)
        if record.prompts_taken is not None:
            self._prompts_taken, self._last_taken = record.prompts_taken, record.last_taken

    def _start(self, place: PromptPlace) -> None:
        """Note a prompt that was taken from the prompts that had been returned, or from the source."""
        for number, returned in enumerate(self._returned):
            if (returned.epoch, returned.row) == (place.epoch, place.row):
                del self._returned[number]
                return
        self._started.append(place)

    def _finish(self, group_id: GroupId, content: Content) -> None:
        if any(group_id in batch for batch in self.batches.values()):
            return
        self.in_flight.pop(group_id, None)
        self.buffered[group_id] = content
        self._verdicts.pop(group_id, None)
        self._verdicts[group_id] = True

    def _filter(self, record: Filtered) -> None:
        if record.group_id not in self.buffered:
            self._verdicts[record.group_id] = False
        self._numbers["filtered"] += 1
        self._numbers["filtered_tokens"] += record.num_tokens
        self._numbers["observed_tokens"] += record.num_observed
        self._reasons[record.reason] = self._reasons.get(record.reason, 0) + 1
        self._remove(record.group_id)

    def _leave(self, record: Left) -> None:
        self._numbers[record.outcome] += 1
        self._numbers[f"{record.outcome}_tokens"] += record.num_tokens
        if (content := self.buffered.get(record.group_id)) is not None:
            self._numbers["observed_tokens"] += content.finished().group.num_observed
        place = self._remove(record.group_id)
        if record.returns_prompt and place is not None:
            self._returned.append(place)

    def _remove(self, group_id: GroupId) -> PromptPlace | None:
        self.in_flight.pop(group_id, None)
        self.buffered.pop(group_id, None)
        return self._places.pop(group_id, None)

    def _take(self, record: Taken, segment: OpenSegment, frame: Frame) -> None:
        self.buffered |= self.batches.pop(record.step, {})  # after a restart, the step is taken again
        if missing := [each for each in record.group_ids if each not in self.buffered]:
            at = frame.stop - len(frame.body)
            raise segment.damaged(at, f"step {record.step} takes group {missing[0]}, which is not buffered")
        self.batches[record.step] = {group_id: self.buffered.pop(group_id) for group_id in record.group_ids}

    def _train(self, record: Trained) -> None:
        self.steps_done = record.step + 1
        self._trained.add(record.step)
        self._skipped.discard(record.step)
        if record.is_skipped:
            self._skipped.add(record.step)

    def _waste(self, record: Wasted) -> None:
        self._numbers["wasted"] += record.num_tokens

    def _publish(self, record: Published) -> None:
        self._published = record

    def _evaluate(self, record: Evaluated) -> None:
        self._evaluated.append(record)

    def _deliver(self, record: Delivered) -> None:
        self._delivered = record.num_tokens


_NUMBERS = (
    "admitted",
    "filtered",
    "filtered_tokens",
    "stale",
    "stale_tokens",
    "failed",
    "failed_tokens",
    "observed_tokens",
    "left_out",
    "wasted",
)
"""The fields of ``Counts`` that are numbers."""
