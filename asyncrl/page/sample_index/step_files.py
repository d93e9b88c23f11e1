"""The files of samples of a run, one for each step, as the page reads them."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from asyncrl.rollout_log.files import ROLLOUTS_FOLDER, file_of, schema

_NAME = re.compile(r"step-(\d{6,9})\.parquet")
_ROWS_AT_ONCE = 16
"""Samples whose tokens are decoded together: 16 of 32,768 tokens take 10 MB."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The size and the time of a file; a step that was written again has another one."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Found:
    """The files in a run's folder of samples."""

    steps: Mapping[int, Stamp] = field(default_factory=dict)
    foreign: Sequence[str] = ()
    """Names of files that no run writes."""


def find(run_dir: Path, last_step: int | None = None) -> Found:
    """Return the files of all steps up to ``last_step``.  A missing folder has none.  Raises OSError."""
    steps: dict[int, Stamp] = {}
    foreign = []
    for name, stamp in _entries(run_dir / ROLLOUTS_FOLDER):
        match = _NAME.fullmatch(name)
        if match is None:
            foreign.append(name)
        elif last_step is None or int(match[1]) <= last_step:
            steps[int(match[1])] = stamp
    return Found(steps, sorted(foreign))


def _entries(folder: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield name and stamp of each file; hidden ones are being written."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                yield entry.name, Stamp(found.st_size, found.st_mtime_ns)


def read_columns(run_dir: Path, step: int, columns: Sequence[str]) -> Any:
    """Return some columns of a step's file as pyarrow's table.  Raises DataError."""
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    with _opened(run_dir, step) as file:
        table = file.read(columns=["step", *columns], use_threads=False).replace_schema_metadata(None)
        if not pc.all(pc.equal(table["step"], step)).as_py():
            raise DataError(f"{file_of(run_dir, step)} is no file of step {step}")
    return table


def read_samples(
    run_dir: Path, step: int, group_id: int, columns: Sequence[str], sample: int | None = None
) -> list[dict[str, Any]]:
    """Return some columns of the samples of a group, or of one sample, in their order.  Raises DataError."""
    import pyarrow.compute as pc

    rows: list[dict[str, Any]] = []
    with _opened(run_dir, step) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=["group_id", "sample", *columns], use_threads=False):
            group = batch.filter(pc.equal(batch.column("group_id"), group_id))
            chosen = group if sample is None else group.filter(pc.equal(group.column("sample"), sample))
            rows += chosen.to_pylist()
            if rows and (sample is not None or batch.column("group_id")[-1].as_py() != group_id):
                break  # a run writes the samples of a group one after another
    return sorted(rows, key=lambda row: int(row["sample"]))


@contextmanager
def _opened(run_dir: Path, step: int) -> Iterator[Any]:
    """Open a step's file.  Raises DataError, also for what pyarrow raises while the file is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    path = file_of(run_dir, step)
    try:
        with pq.ParquetFile(path) as file:
            _check(path, file.schema_arrow)
            yield file
    except (OSError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read: {reason}") from error


def _check(path: Path, found: Any) -> None:
    """Raise DataError if a column that runs write is missing, or has another type."""
    for column in _written():
        if column.name not in found.names or found.field(column.name).type != column.type:
            raise DataError(f"{path} is no file of samples: it has no column {column.name} of {column.type}")


@cache
def _written() -> Any:
    return schema()
