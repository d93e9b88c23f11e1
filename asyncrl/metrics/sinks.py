"""Sinks for rows of numbers.  Every row is on disk when ``write`` returns, so a killed run's rows stay readable.

A full disk delays rows or loses them; it raises nothing (``AppendedFile``).
"""

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from asyncrl.metrics.appended_file import AppendedFile

logger = logging.getLogger(__name__)

type Row = Mapping[str, float | int]
"""Numbers by name; always contains ``step``."""

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_TAIL_BYTES = 65_536
"""Bytes read at once while looking for the last complete line."""


class Sink(Protocol):
    """A destination of rows.  Not safe to call from two threads at once."""

    def write(self, row: Row, /) -> None:
        """Store one row."""

    def close(self) -> None:
        """Finish; ``write`` must not be called afterwards."""


class JsonlSink:
    """One JSON object per row in ``run_dir/metrics.jsonl``; a resumed run appends to it.

    A number that is not finite becomes ``null``.  A row that an earlier run left torn is removed.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / METRICS_FILE
        try:
            _end_with_a_line(path)
        except OSError as error:
            logger.warning("%s: its last line may be torn: %s", path, error.strerror)
        self._file = AppendedFile(path)

    def write(self, row: Row, /) -> None:
        """Append one line."""
        self._file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """One TensorBoard event per row, in ``run_dir/tensorboard``.

    The reward of held-out prompts is drawn over the step of the weights it measured, everything else over the step of
    its row.  The file is written record by record: ``tensorboard.summary.Writer`` would keep rows in a thread and
    import tensorflow if it is installed.  Importing tensorboard takes 0.8 s, so it is imported when a sink is made.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run_dir / TENSORBOARD_FOLDER
        with suppress(OSError):  # the file then says why it cannot be opened
            folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        # TensorBoard reads the files of a folder in the order of their names; nanoseconds keep a resumed run apart.
        self._records = RecordWriter(AppendedFile(folder / f"events.out.tfevents.{time.time_ns()}"))
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, row: Row, /) -> None:
        """Append one event for each training step that the row has numbers for."""
        held_out = {name: value for name, value in row.items() if name.startswith("eval/")}
        self._put_values(row["step"], {name: row[name] for name in row if name != "step" and name not in held_out})
        self._put_values(row.get("eval/step", row["step"]), held_out)

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _put_values(self, step: float, numbers: Row) -> None:
        if numbers:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
            self._put(self._event(wall_time=time.time(), step=int(step), summary=self._summary(value=values)))

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _end_with_a_line(path: Path) -> None:
    """Cut off the part of a row at the end of ``path``, and complete a row that lacks only its line break.

    Raises OSError.
    """
    if not path.exists():
        return
    with path.open("r+b") as file:
        tail = _after_last_line(file)
        if not tail:
            return
        try:
            orjson.loads(tail)
        except orjson.JSONDecodeError:
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _after_last_line(file: BinaryIO) -> bytes:
    tail, start = b"", file.seek(0, os.SEEK_END)
    while start and b"\n" not in tail:
        start = max(0, start - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
    return tail.rpartition(b"\n")[2]
