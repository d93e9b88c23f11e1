"""Random histories of a run as records, and the state that a recovery from them must give."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.buffer.journal import (
    Admitted,
    Counts,
    Delivered,
    Evaluated,
    Filtered,
    Finished,
    Grown,
    HeldGroup,
    Left,
    LeftOut,
    PromptPlace,
    Published,
    Record,
    Recovered,
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.buffer.journal.frames import SegmentHeader, framed
from asyncrl.buffer.journal.record_bytes import KINDS, RecordWriter
from asyncrl.buffer.journal.segments import segment_of
from asyncrl.types import Batch, GroupId
from tests.unit.buffer.journal.made import finished, grown, place

GROUPS_PER_STEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record as it was written."""

    run_epoch: int
    record: Record
    opens: bool = False
    """Whether a journal begins with it."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A run that takes random turns and writes down what happens."""

    random: random.Random
    entries: list[Entry] = field(default_factory=list)
    epoch: int = 1
    in_flight: dict[GroupId, Admitted] = field(default_factory=dict)
    lengths: Counter[GroupId] = field(default_factory=Counter)
    buffered: dict[GroupId, PromptPlace] = field(default_factory=dict)
    returned: list[PromptPlace] = field(default_factory=list)
    prompts_taken: int = 0
    next_id: int = 0
    order: int = 0
    step: int = 0
    in_training: bool = False

    def write(self, record: Record, *, opens: bool = False) -> None:
        self.entries.append(Entry(run_epoch=self.epoch, record=record, opens=opens or not self.entries))

    def turn(self) -> None:
        choices = [self.admit, self.admit, self.admit, self.finish, self.finish, self.finish, self.finish_again]
        choices += [self.grow, self.filter, self.leave, self.leave_out, self.small, self.take, self.take, self.restart]
        self.random.choice(choices)()

    def prompt(self) -> PromptPlace:
        if self.returned:
            return self.returned.pop(0)
        self.prompts_taken += 1
        return place(self.prompts_taken)

    def admit(self) -> None:
        at, group_id = self.prompt(), GroupId(self.next_id)
        self.next_id += 1
        record = Admitted(
            group_id=group_id, place=at, prompts_taken=self.prompts_taken, last_taken=(0, self.prompts_taken)
        )
        self.in_flight[group_id] = record
        self.write(record)

    def grow(self) -> None:
        if self.in_flight:
            group_id = self.random.choice(list(self.in_flight))
            start, self.lengths[group_id] = self.lengths[group_id], self.lengths[group_id] + 3
            self.write(grown(group_id, start, start + 3, index=self.random.randrange(2)))

    def finish(self) -> None:
        if self.in_flight:
            group_id = self.random.choice(list(self.in_flight))
            self.buffered[group_id] = self.in_flight.pop(group_id).place
            self._finished(group_id)

    def finish_again(self) -> None:
        if self.buffered:
            self._finished(self.random.choice(list(self.buffered)))

    def _finished(self, group_id: GroupId) -> None:
        self.order += 1
        self.write(finished(group_id, order=self.order, deadline=self.step, reward=self.random.random()))

    def filter(self) -> None:
        if groups := [*self.in_flight, *self.buffered]:
            group_id = self.random.choice(groups)
            self._gone(group_id)
            reason = self.random.choice(["all right", "all wrong"])
            self.write(Filtered(group_id=group_id, reason=reason, num_tokens=6, num_observed=2))

    def leave(self) -> None:
        if groups := [*self.in_flight, *self.buffered]:
            group_id = self.random.choice(groups)
            at, returns = self._gone(group_id), self.random.random() < 0.5
            if returns:
                self.returned.append(at)
            outcome = self.random.choice(["stale", "failed"])
            self.write(Left(group_id=group_id, outcome=outcome, num_tokens=5, returns_prompt=returns))  # type: ignore[arg-type]

    def _gone(self, group_id: GroupId) -> PromptPlace:
        return self.buffered.pop(group_id) if group_id in self.buffered else self.in_flight.pop(group_id).place

    def leave_out(self) -> None:
        at = self.prompt()
        self.write(LeftOut(place=at, prompts_taken=self.prompts_taken, last_taken=(0, self.prompts_taken)))

    def small(self) -> None:
        number = self.random.randrange(9)
        small: list[Record] = [
            Wasted(num_tokens=number),
            Published(version=number, step=self.step),
            Evaluated(version=number, step=self.step),
            Delivered(num_tokens=number),
        ]
        self.write(self.random.choice(small))

    def take(self) -> None:
        """Take a batch, or end the step in training, perhaps with a checkpoint."""
        if self.in_training:
            self.write(Trained(step=self.step, is_skipped=self.random.random() < 0.3))
            self.step += 1
            self.in_training = False
            if self.random.random() < 0.5:
                self.snapshot()
        elif len(self.buffered) >= GROUPS_PER_STEP:
            chosen = tuple(self.random.sample(list(self.buffered), GROUPS_PER_STEP))
            for group_id in chosen:
                del self.buffered[group_id]
            self.write(Taken(step=self.step, group_ids=chosen))
            self.in_training = True

    def snapshot(self) -> None:
        flying = ((group_id, admitted.place, False) for group_id, admitted in self.in_flight.items())
        waiting = ((group_id, at, True) for group_id, at in self.buffered.items())
        held = (
            HeldGroup(group_id=group_id, place=at, is_buffered=buffered)
            for group_id, at, buffered in (*flying, *waiting)
        )
        self.write(Snapshot(step=self.step, state={"taken": self.prompts_taken}, held=tuple(held)))
        self.returned.clear()  # they are in the scheduler's state from here on

    def restart(self) -> None:
        """Continue as another run, which starts the groups in flight again."""
        if self.random.random() < 0.2:
            self.epoch += 1
            self.order = 0
            self.write(Wasted(num_tokens=0), opens=True)
            for admitted in list(self.in_flight.values()):
                self.write(admitted)


def history(seed: int, num_turns: int) -> list[Entry]:
    run = Run(random=random.Random(seed))
    run.snapshot()
    for _ in range(num_turns):
        run.turn()
    return run.entries


def write_history(folder: Path, entries: Sequence[Entry]) -> None:
    """Write the segments that a journal would write."""
    number, sequence, data = 0, 0, bytearray()
    for entry in entries:
        if entry.opens or isinstance(entry.record, Snapshot):
            size = len(data) if entry.opens else None
            number, data = number + 1, bytearray()
            sequence = 0 if entry.opens else sequence
            data += SegmentHeader(run_epoch=entry.run_epoch, number=number, size_before=size).packed()
        sequence += not isinstance(entry.record, Delivered)
        data += frame(entry, sequence)
        segment_of(folder, number).path.write_bytes(data)


def frame(entry: Entry, sequence: int) -> bytes:
    body = RecordWriter(entry.record, lambda names: None)
    for _ in body.steps():
        pass
    parts = framed(entry.run_epoch, sequence, KINDS[type(entry.record)], body.buffers())
    return b"".join(bytes(memoryview(each)) for each in parts)


# ---- the model


def expected(entries: Sequence[Entry], step: int) -> Recovered | None:
    """Return the state by questions to the list of records: slow, and unlike the code under test."""
    records = [entry.record for entry in entries]
    bases = [place for place, each in enumerate(records) if isinstance(each, Snapshot) and each.step == step]
    if not bases:
        return None
    snapshot = records[bases[-1]]
    assert isinstance(snapshot, Snapshot)
    after = records[bases[-1] + 1 :]
    held = {each.group_id: each for each in snapshot.held}
    started = [each for each in after if isinstance(each, Admitted)]
    first_started = {each.group_id: each for each in reversed(started)}
    new = [each for group_id, each in first_started.items() if group_id not in held]
    left = [each for each in after if isinstance(each, Left)]
    filtered = [each for each in after if isinstance(each, Filtered)]
    gone = {each.group_id for each in left} | {each.group_id for each in filtered}
    was_buffered = {each.group_id for each in held.values() if each.is_buffered} | {
        each.group.group_id for each in after if isinstance(each, Finished)
    }
    taken = {each.step: each.group_ids for each in after if isinstance(each, Taken)}
    in_batches = {group_id for group_ids in taken.values() for group_id in group_ids}
    contents = {entry.record.group.group_id: entry for entry in entries if isinstance(entry.record, Finished)}
    waiting = [contents[group_id] for group_id in was_buffered - gone - in_batches]
    waiting.sort(key=lambda entry: (entry.record.dispatch.deadline, entry.run_epoch, entry.record.dispatch.order))  # type: ignore[union-attr]
    unknown = {
        group_id: Admitted(group_id=group_id, place=each.place, prompts_taken=0, last_taken=None)
        for group_id, each in held.items()
    }
    admitted = {**unknown, **{each.group_id: each for each in started}}
    returned, begun = prompts(snapshot, after)
    numbers = [each for each in after if isinstance(each, Admitted | LeftOut)]
    trained = [each for each in after if isinstance(each, Trained)]
    in_flight = sorted(admitted.keys() - was_buffered - gone)
    growth = {
        group_id: tuple(each for each in records if isinstance(each, Grown) and each.group_id == group_id)
        for group_id in in_flight
    }
    return Recovered(
        step=step,
        state=snapshot.state,
        batches=tuple(
            Batch(step=number, groups=tuple(contents[each].record.group for each in taken[number]))  # type: ignore[union-attr]
            for number in sorted(taken)
        ),
        skipped=frozenset(each.step for each in trained if each.is_skipped),
        trained=frozenset(each.step for each in trained),
        buffered=tuple(entry.record for entry in waiting),  # type: ignore[misc]
        in_flight=tuple(admitted[each] for each in in_flight),
        growth={group_id: found for group_id, found in growth.items() if found},
        returned=tuple(returned),
        started=tuple(begun),
        counts=Counts(
            admitted=len(new),
            filtered=len(filtered),
            filtered_tokens=6 * len(filtered),
            stale=sum(each.outcome == "stale" for each in left),
            stale_tokens=5 * sum(each.outcome == "stale" for each in left),
            failed=sum(each.outcome == "failed" for each in left),
            failed_tokens=5 * sum(each.outcome == "failed" for each in left),
            observed_tokens=2 * len(filtered),
            left_out=sum(isinstance(each, LeftOut) for each in after),
            wasted=sum(each.num_tokens for each in after if isinstance(each, Wasted)),
            reasons=Counter(each.reason for each in filtered),
            verdicts=verdicts(snapshot, after),
        ),
        next_group_id=max((GroupId(each.group_id + 1) for each in started), default=None),
        prompts_taken=numbers[-1].prompts_taken if numbers else None,
        last_taken=numbers[-1].last_taken if numbers else None,
        published=next((each for each in reversed(after) if isinstance(each, Published)), None),
        evaluated=tuple(each for each in after if isinstance(each, Evaluated)),
        delivered=next((each.num_tokens for each in reversed(after) if isinstance(each, Delivered)), None),
    )


def prompts(snapshot: Snapshot, after: Sequence[Record]) -> tuple[list[PromptPlace], list[PromptPlace]]:
    """Return the prompts that wait after their return, and prompts that started without one."""
    places = {each.group_id: each.place for each in snapshot.held}
    events: list[tuple[str, PromptPlace]] = []
    for each in after:
        match each:
            case Admitted() if each.group_id not in places:
                places[each.group_id] = each.place
                events.append(("start", each.place))
            case LeftOut():
                events.append(("start", each.place))
            case Left(returns_prompt=True):
                events.append(("return", places[each.group_id]))
    waiting, begun = list[PromptPlace](), list[PromptPlace]()
    for kind, at in events:
        if kind == "return":
            waiting.append(at)
        elif at in waiting:
            waiting.remove(at)
        else:
            begun.append(at)
    return waiting, begun


def verdicts(snapshot: Snapshot, after: Sequence[Record]) -> tuple[bool, ...]:
    """Return one verdict per group, at the place of its last ``Finished`` record, or where a filter dropped it."""
    buffered = {each.group_id for each in snapshot.held if each.is_buffered}
    last = {each.group.group_id: number for number, each in enumerate(after) if isinstance(each, Finished)}
    rejected = {
        each.group_id: number
        for number, each in enumerate(after)
        if isinstance(each, Filtered) and each.group_id not in buffered and each.group_id not in last
    }
    found = {**dict.fromkeys(last.values(), True), **dict.fromkeys(rejected.values(), False)}
    return tuple(found[number] for number in sorted(found))
