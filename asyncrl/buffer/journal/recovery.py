"""The state of a run as its journal has it, from a checkpoint on."""

from collections.abc import Callable, Sequence, Set
from pathlib import Path

from asyncrl.buffer.journal.frames import SEGMENT_BYTES, Kind
from asyncrl.buffer.journal.groups import group_id_of
from asyncrl.buffer.journal.reader import OpenSegment, opened
from asyncrl.buffer.journal.records import Snapshot
from asyncrl.buffer.journal.replay import Content, Recovered, Replay
from asyncrl.errors import JournalDamaged
from asyncrl.types import GroupId


def recover(folder: Path, step: int, mark: str | None = None) -> Recovered | None:
    """Return the state of the run from the checkpoint of ``step`` on; None without a snapshot of that checkpoint.

    ``mark`` is that of the checkpoint's state, which tells it from one of the same step that was never completed, or
    has been replaced; None takes any.  Of several such snapshots, the last one counts.  Records after a snapshot of an
    earlier step do not: the run was then resumed from before ``step``.  Raises JournalDamaged.
    """
    replay = replay_from(folder, step, mark)
    return None if replay is None else replay.recovered()


def replay_from(folder: Path, step: int, mark: str | None = None) -> Replay | None:
    """Apply the records from the last snapshot of ``step`` on; None without one.  Raises JournalDamaged.

    ``mark`` is that of the snapshot's state; None takes any.  The run that writes the journal may be running.
    """
    try:
        found = opened(folder)
    except FileNotFoundError:
        return None
    base = last_snapshot(found, lambda each: each.step == step and mark in (None, each.state.get("mark")))
    return None if base is None else replayed(found, base)


def has_snapshot(folder: Path, step: int) -> bool:
    """Return whether there is a snapshot of ``step``, with whatever mark.  Raises JournalDamaged."""
    try:
        return last_snapshot(opened(folder), lambda each: each.step == step) is not None
    except FileNotFoundError:
        return False


def last_snapshot(found: Sequence[OpenSegment], is_wanted: Callable[[Snapshot], bool]) -> int | None:
    """Return the place of the last segment that has a wanted snapshot; None without one."""
    for place in reversed(range(len(found))):
        if (snapshot := found[place].snapshot()) is not None and is_wanted(snapshot):
            return place
    return None


def replayed(found: Sequence[OpenSegment], base: int, until: int | None = None) -> Replay:
    """Apply the records from the snapshot of segment ``base`` on.

    ``until`` ends with the record after which so many steps were trained.  Raises JournalDamaged.
    """
    snapshot = found[base].snapshot()
    assert snapshot is not None, "the segment begins with a snapshot"
    replay = Replay(snapshot, _contents_before(found[:base], snapshot), _growth_before(found[:base], snapshot))
    marks = set[object]()
    for before, segment in zip([None, *found[base:-1]], found[base:], strict=True):
        if marks and _is_of_another(segment, snapshot.step, marks):
            return replay  # a segment may be missing before it: nothing of this history was needed any more
        if (begins := segment.snapshot()) is not None:
            marks.add(begins.state.get("mark"))
        _check_follows(before, segment)
        stop = SEGMENT_BYTES
        for frame in segment.frames():
            if until is not None and replay.steps_done >= until:
                return replay
            replay.apply(segment, frame)
            stop = frame.stop
        replay.num_torn_bytes += len(segment.data) - stop
    return replay


def _is_of_another(segment: OpenSegment, step: int, marks: Set[object]) -> bool:
    """Return whether a segment begins a history other than that of the checkpoints with ``marks``, from ``step`` on.

    Its run was resumed from an earlier step, or from a checkpoint at which the journal was off.
    """
    begins = segment.snapshot()
    if begins is None:
        return False
    is_first = segment.header.size_before is not None
    return begins.step < step or (is_first and begins.state.get("mark") not in marks)


def _check_follows(before: OpenSegment | None, segment: OpenSegment) -> None:
    missing = segment.segment.number - before.segment.number - 1 if before is not None else 0
    if missing > segment.num_uncounted:
        raise segment.damaged(0, f"{missing} segments before it are missing")


def _contents_before(found: Sequence[OpenSegment], snapshot: Snapshot) -> dict[GroupId, Content]:
    """Find the last content of each group that was buffered at the snapshot."""
    needed = {held.group_id for held in snapshot.held if held.is_buffered}
    contents = dict[GroupId, Content]()
    for segment in found:
        for frame in segment.frames_of(Kind.FINISHED, needed):
            contents[group_id_of(frame.body)] = Content(segment=segment, frame=frame)
    if missing := sorted(needed - contents.keys()):
        raise JournalDamaged(
            f"no segment has the content of {len(missing)} groups, such as {missing[0]}",
            str(found[-1].segment.path.parent if found else "the journal"),
            0,
        )
    return contents


def _growth_before(found: Sequence[OpenSegment], snapshot: Snapshot) -> dict[GroupId, list[Content]]:
    """Find the tokens of each group that was in flight at the snapshot, in order."""
    growth: dict[GroupId, list[Content]] = {held.group_id: [] for held in snapshot.held if not held.is_buffered}
    for segment in found:
        for frame in segment.frames_of(Kind.GROWN, growth.keys()):
            growth[group_id_of(frame.body)].append(Content(segment=segment, frame=frame))
    return growth
