"""The journal of a run: every event in the life of its groups, on the disk, for a restart without lost samples."""

from asyncrl.buffer.journal.journal import Journal
from asyncrl.buffer.journal.reader import read
from asyncrl.buffer.journal.recorded_steps import RecordedSteps
from asyncrl.buffer.journal.records import (
    Admitted,
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
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.buffer.journal.recovery import has_snapshot, recover
from asyncrl.buffer.journal.replay import Counts, Recovered
from asyncrl.buffer.journal.segments import newest_epoch

__all__ = [
    "Admitted",
    "Counts",
    "Delivered",
    "Evaluated",
    "Filtered",
    "Finished",
    "Grown",
    "HeldGroup",
    "Journal",
    "Left",
    "LeftOut",
    "PromptPlace",
    "Published",
    "Record",
    "RecordedSteps",
    "Recovered",
    "Snapshot",
    "Taken",
    "Trained",
    "Wasted",
    "has_snapshot",
    "newest_epoch",
    "read",
    "recover",
]
