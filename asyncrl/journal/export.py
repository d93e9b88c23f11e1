"""Finished groups as a Parquet file, with the columns of a run's files of samples."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.buffer import masked_before
from asyncrl.buffer.journal.frames import Frame, Kind
from asyncrl.buffer.journal.groups import group_id_of
from asyncrl.buffer.journal.reader import OpenSegment, opened
from asyncrl.buffer.journal.records import Finished, Snapshot, Taken
from asyncrl.rollout_log.files import rows_of, write_rows
from asyncrl.rollout_log.whole_file import write_whole
from asyncrl.types import Batch, GroupId, TrainReport

_ROWS_AT_ONCE = 256
"""Rows of a part of the file, so that a journal larger than the memory can be exported."""
_NOT_TRAINED = TrainReport(
    loss=0.0, grad_norm=0.0, clip_fraction=0.0, entropy=0.0, learning_rate=0.0, seconds=0.0, logprobs=()
)

type _Step = tuple[int, int | None]
"""The step that took a group, and the largest lag of a token in its loss; None if the journal does not tell."""


def export(folder: Path, file: Path) -> int:
    """Write the last content of each finished group and return their number.  Raises JournalDamaged, OSError.

    Tokens that were too old for the loss when a step took their group are masked.  ``step`` and ``lag`` are null in
    groups that no step took.  Groups whose end is in a deleted segment are left out.  The file appears whole or not at
    all.
    """
    contents = dict[GroupId, tuple[OpenSegment, Frame]]()
    steps = dict[GroupId, _Step]()
    before, staleness = 0, None
    for segment in opened(folder):
        if (snapshot := segment.snapshot()) is not None:
            staleness = _max_staleness(snapshot)
            if segment.segment.number - 1 - segment.num_uncounted > before:  # segments were deleted
                kept = steps.keys() | {held.group_id for held in snapshot.held if held.is_buffered}
                contents = {group_id: content for group_id, content in contents.items() if group_id in kept}
            for batch in snapshot.pending:
                steps |= dict.fromkeys(batch.group_ids, (batch.step, staleness))
        before = segment.segment.number
        for frame in segment.frames():
            if frame.kind is Kind.FINISHED:
                contents[group_id_of(frame.body)] = segment, frame
            elif frame.kind is Kind.TAKEN:
                taken = segment.record(frame)
                assert isinstance(taken, Taken), "the kind is known"
                steps |= dict.fromkeys(taken.group_ids, (taken.step, staleness))
    write_whole(file, lambda partial: write_rows(partial, _parts(contents, steps)))
    return len(contents)


def _parts(
    contents: dict[GroupId, tuple[OpenSegment, Frame]], steps: dict[GroupId, _Step]
) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    for group_id, (segment, frame) in contents.items():
        finished = segment.record(frame)
        assert isinstance(finished, Finished), "the kind is known"
        rows += _rows(finished, steps.get(group_id))
        if len(rows) >= _ROWS_AT_ONCE:
            yield rows
            rows = []
    yield rows


def _rows(finished: Finished, taken: _Step | None) -> Iterator[dict[str, Any]]:
    step, staleness = (0, None) if taken is None else taken
    group = finished.group if staleness is None else masked_before(finished.group, step - staleness)
    for row in rows_of(Batch(step=step, groups=(group,)), _NOT_TRAINED):
        yield row if taken is not None else row | {"step": None, "lag": None}


def _max_staleness(snapshot: Snapshot) -> int | None:
    """Return the bound among the settings that a run notes in its journal."""
    about = snapshot.state.get("about")
    found = about.get("max-staleness") if isinstance(about, Mapping) else None
    return int(found) if isinstance(found, str) and found.isdecimal() else None
