import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.journal import (
    Admitted,
    Finished,
    Grown,
    Left,
    Record,
    Recovered,
    Snapshot,
    Taken,
    Trained,
    Wasted,
    has_snapshot,
    recover,
)
from asyncrl.buffer.journal.frames import FRAME_BYTES, Kind, skimmed
from asyncrl.buffer.journal.retention import Retention
from asyncrl.buffer.journal.segments import segment_of, segments
from asyncrl.errors import JournalDamaged
from asyncrl.types import GroupId
from tests.unit.buffer.journal.disks import write
from tests.unit.buffer.journal.histories import Entry, expected, history, write_history
from tests.unit.buffer.journal.made import bits, finished, held, place


def steps(entries: list[Entry]) -> list[int]:
    return [entry.record.step for entry in entries if isinstance(entry.record, Snapshot)]


@given(st.integers(0, 2**32), st.integers(0, 120), st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_a_history_cut_anywhere_gives_the_state_of_a_simple_model(seed: int, num_turns: int, share: float) -> None:
    entries = history(seed, num_turns)
    entries = entries[: max(1, int(share * len(entries)))]
    with tempfile.TemporaryDirectory() as folder:
        write_history(Path(folder), entries)
        for step in (*steps(entries), 999):
            assert comparable(recover(Path(folder), step)) == comparable(expected(entries, step)), step


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=50, deadline=None)
def test_deleted_segments_are_missed_by_no_later_recovery(seed: int, data: st.DataObject) -> None:
    entries = history(seed, 120)
    step = data.draw(st.sampled_from(steps(entries)))
    with tempfile.TemporaryDirectory() as folder:
        write_history(Path(folder), entries)
        for number in retention(entries).dispensable(step):
            segment_of(Path(folder), number).path.unlink()
        assert segments(Path(folder))
        for later in (each for each in steps(entries) if each >= step):
            assert comparable(recover(Path(folder), later)) == comparable(expected(entries, later)), later


def retention(entries: list[Entry]) -> Retention:
    """The segments of ``write_history`` as the writer notes them."""
    kept, number = Retention(), 0
    for entry in entries:
        if entry.opens or isinstance(entry.record, Snapshot):
            number += 1
            kept.add(number)
        if isinstance(entry.record, Snapshot):
            kept.note_snapshot(number, entry.record)
        if isinstance(entry.record, Finished):
            kept.note(number, [entry.record.group.group_id], ())
        if isinstance(entry.record, Grown):
            kept.note(number, (), [entry.record.group_id])
    return kept


def comparable(found: Recovered | None) -> object:
    if found is None:
        return None
    reasons, growth = dict(sorted(found.counts.reasons.items())), dict(sorted(found.growth.items()))
    return bits(replace(found, counts=replace(found.counts, reasons=reasons), growth=growth))


# ---- by hand


def snapshot(step: int, *groups: int, in_flight: tuple[int, ...] = ()) -> Snapshot:
    waiting = (held(each, is_buffered=True) for each in groups)
    flying = (held(each, is_buffered=False) for each in in_flight)
    return Snapshot(step=step, state={"step": step}, held=(*waiting, *flying))


def admitted(group_id: int) -> Admitted:
    return Admitted(group_id=GroupId(group_id), place=place(group_id), prompts_taken=group_id, last_taken=(0, group_id))


def taken(step: int, *groups: int) -> Taken:
    return Taken(step=step, group_ids=tuple(map(GroupId, groups)))


def recovered(folder: Path, step: int) -> Recovered:
    found = recover(folder, step)
    assert found is not None
    return found


def test_without_a_folder_or_a_snapshot_there_is_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path / "none", 0) is None
    write(tmp_path, [Wasted(num_tokens=1)])
    assert recover(tmp_path, 0) is None


def test_a_batch_in_training_is_recovered_with_its_groups(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), *map(finished, (0, 1, 2)), taken(0, 2, 0)])
    found = recovered(tmp_path, 0)
    assert bits(found.batches[0].groups) == bits((finished(2).group, finished(0).group))
    assert bits(found.buffered) == bits((finished(1),))
    assert found.trained == frozenset()


def test_a_step_that_is_taken_again_after_a_restart_is_one_batch(tmp_path: Path) -> None:
    first: list[Record] = [snapshot(0), *map(finished, (0, 1, 2)), taken(0, 0, 1), Trained(step=0, is_skipped=True)]
    write(tmp_path, first, run_epoch=1)
    write(tmp_path, [taken(0, 0, 1), Trained(step=0, is_skipped=False), taken(1, 2)], run_epoch=2)
    found = recovered(tmp_path, 0)
    assert [(batch.step, [group.group_id for group in batch.groups]) for batch in found.batches] == [
        (0, [0, 1]),
        (1, [2]),
    ]
    assert found.skipped == frozenset()
    assert found.trained == {0}
    assert found.buffered == ()


def test_a_run_that_was_resumed_from_an_earlier_step_ends_the_history(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), snapshot(4), Wasted(num_tokens=1)], run_epoch=1)
    write(tmp_path, [snapshot(0), Wasted(num_tokens=10)], run_epoch=2)
    assert recovered(tmp_path, 4).counts.wasted == 1
    assert recovered(tmp_path, 0).counts.wasted == 10


def test_a_snapshot_of_another_checkpoint_of_the_step_is_no_beginning(tmp_path: Path) -> None:
    incomplete, later = (Snapshot(step=2, state={"mark": mark}, held=()) for mark in ("torn", "later"))
    write(tmp_path, [snapshot(0), incomplete, Wasted(num_tokens=1)], run_epoch=1)
    write(tmp_path, [snapshot(0), Wasted(num_tokens=10), snapshot(1)], run_epoch=2)
    segment_of(tmp_path, 3).path.unlink()
    assert recover(tmp_path, 2, "later") is None
    assert has_snapshot(tmp_path, 2)
    assert not has_snapshot(tmp_path, 3)
    write(tmp_path, [later, Wasted(num_tokens=5)], run_epoch=3)
    found = recover(tmp_path, 2, "later")
    assert found is not None
    assert found.counts.wasted == 5


def test_a_segment_may_be_missing_before_a_run_that_was_resumed_from_an_earlier_step(tmp_path: Path) -> None:
    """The run that was resumed has deleted it, because no recovery from its own checkpoint needs it."""
    first: list[Record] = [snapshot(3), admitted(1), finished(1), snapshot(5, 1), admitted(7), finished(7)]
    write(tmp_path, [*first, snapshot(7, 1, 7), Wasted(num_tokens=1)], run_epoch=1)
    write(tmp_path, [snapshot(3, 1, 7), Wasted(num_tokens=2)], run_epoch=2)
    segment_of(tmp_path, 3).path.unlink()
    found = recovered(tmp_path, 5)
    assert bits(found.buffered) == bits((finished(1), finished(7)))
    assert found.counts.wasted == 0


def test_a_run_that_was_resumed_from_a_checkpoint_without_a_journal_ends_the_history(tmp_path: Path) -> None:
    old, later = (Snapshot(step=step, state={"mark": mark}, held=()) for step, mark in ((5, "old"), (7, "later")))
    write(tmp_path, [old, admitted(1), finished(1), taken(5, 1), Trained(step=5, is_skipped=False)], run_epoch=1)
    write(tmp_path, [old, admitted(2), finished(2), taken(6, 2)], run_epoch=2)
    write(tmp_path, [later, admitted(3), finished(3), taken(7, 3)], run_epoch=4)
    found = recover(tmp_path, 5, "old")
    assert found is not None
    assert [batch.step for batch in found.batches] == [6]
    assert [batch.step for batch in recovered(tmp_path, 7).batches] == [7]


def test_a_stale_prompt_that_started_again_is_not_returned(tmp_path: Path) -> None:
    left = [Left(group_id=GroupId(each), outcome="stale", num_tokens=5, returns_prompt=True) for each in (0, 1)]
    again = replace(admitted(2), place=place(0))
    write(tmp_path, [snapshot(2), finished(0), snapshot(3, 0, in_flight=(1,)), *left, again])
    found = recovered(tmp_path, 3)
    assert found.returned == (place(1),)
    assert found.started == ()
    assert found.in_flight == (again,)
    assert (found.counts.stale, found.counts.stale_tokens, found.counts.admitted) == (2, 10, 1)


def test_a_lost_segment_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), finished(0), snapshot(1, 0), snapshot(2, 0)])
    segment_of(tmp_path, 2).path.unlink()
    with pytest.raises(JournalDamaged, match="1 segments before it are missing"):
        recover(tmp_path, 0)
    assert recovered(tmp_path, 2).buffered
    segment_of(tmp_path, 1).path.unlink()
    with pytest.raises(JournalDamaged, match="no segment has the content of 1 groups, such as 0"):
        recover(tmp_path, 2)


def test_a_batch_of_an_unknown_group_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), finished(0), taken(0, 0, 7)])
    with pytest.raises(JournalDamaged, match="step 0 takes group 7, which is not buffered"):
        recover(tmp_path, 0)


def test_damage_in_a_group_that_is_needed_is_found_in_an_earlier_segment(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), finished(0), finished(1), snapshot(1, 1)])
    path = segment_of(tmp_path, 1).path
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalDamaged, match="the record of a group is damaged"):
        recover(tmp_path, 1)


def test_a_damaged_length_that_leaves_no_room_for_a_group_is_damage(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), finished(0), finished(1), snapshot(1, 1)])
    path = segment_of(tmp_path, 1).path
    data = bytearray(path.read_bytes())
    first = next(start for kind, start, _ in skimmed(memoryview(data)) if kind == Kind.FINISHED)
    data[first - FRAME_BYTES + 4 : first - FRAME_BYTES + 8] = (4).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(JournalDamaged, match="no segment has the content of 1 groups, such as 1"):
        recover(tmp_path, 1)
    write(tmp_path, [snapshot(0), finished(2)], run_epoch=2)  # the journal of a new run stays on
    assert [each.group.group_id for each in recovered(tmp_path, 0).buffered] == [2]


def test_a_torn_end_is_counted(tmp_path: Path) -> None:
    write(tmp_path, [snapshot(0), finished(0), finished(1)])
    path = segment_of(tmp_path, 1).path
    path.write_bytes(path.read_bytes()[:-3])
    found = recovered(tmp_path, 0)
    assert [each.group.group_id for each in found.buffered] == [0]
    assert found.num_torn_bytes > 100
