"""Parquet files, addressed by row number."""

import datetime
import decimal
import math
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]

from asyncrl.config.areas import DataConfig
from asyncrl.data.raw_rows import RawRow
from asyncrl.errors import DataError

BLOCK_ROWS = 256
"""Rows of a block, at most.  A block lies in one row group."""
_MAX_CURSORS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """A range of rows of a file.  A row's place is its number from 0."""

    path: Path
    first: int
    stop: int
    extent: int
    """Rows of the whole file."""
    starts: tuple[int, ...]
    """First row of each block."""
    columns: tuple[str, ...]
    """The columns that are read."""
    lines_before: int | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks, known from the file's footer."""
        return len(self.starts)

    def block_of(self, place: int) -> int:
        """Return the block of the row at ``place``."""
        return bisect_right(self.starts, place) - 1

    def read(self, block: int) -> tuple[list[RawRow], int]:
        """Return the rows of a block, which has no lines.  Raises DataError or OSError."""
        start = self.starts[block]
        stop = self.starts[block + 1] if block + 1 < len(self.starts) else self.stop
        return self._rows(start, stop), 0

    def rows(self) -> Iterator[RawRow]:
        """Yield every row.  Raises DataError or OSError."""
        for block in range(self.num_blocks):
            yield from self.read(block)[0]

    def row_at(self, place: int) -> RawRow:
        """Return the row at ``place``.  Raises KeyError, DataError or OSError."""
        if not self.first <= place < self.stop:
            raise KeyError(place)
        (row,) = self._rows(place, place + 1)
        return row

    def where(self, place: int, line: int | None) -> str:
        """Return the position of a row for a person, counted from 0 as in slices."""
        return f"{self.path}, row {place}"

    def _rows(self, start: int, stop: int) -> list[RawRow]:
        found: list[RawRow] = []
        try:
            for batch in _batches(self.path, self.columns, start, stop):
                found += [_converted(start + len(found) + place, value) for place, value in enumerate(_values(batch))]
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.path}, rows {start} to {stop}: {str(error).splitlines()[0]}") from error
        return found


def open_parquet(path: Path, wanted: slice, data: DataConfig) -> ParquetFile:
    """Read the footer.  Raises DataError if the file is not Parquet or lacks a column, or OSError."""
    try:
        with pyarrow.parquet.ParquetFile(path) as handle:
            meta, names = handle.metadata, tuple(handle.schema_arrow.names)
            sizes = [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from error
    total = sum(sizes)
    first, stop, _ = wanted.indices(total)
    keys = (data.input_key, data.label_key, data.metadata_key, data.tool_key)
    # Without a needed column every row is broken; with all columns its line can name them.
    columns = names if {data.input_key, data.label_key} - {None, *names} else tuple(key for key in names if key in keys)
    return ParquetFile(
        path=path, first=first, stop=max(first, stop), extent=total, columns=columns, starts=_starts(sizes, first, stop)
    )


def _starts(sizes: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
    starts, begin = [], 0
    for size in sizes:
        for start in range(begin, begin + size, BLOCK_ROWS):
            end = min(start + BLOCK_ROWS, begin + size)
            if first < end and start < stop:
                starts.append(max(start, first))
        begin += size
    return tuple(starts)


class _Cursor:
    """An open file that is read forwards, because Parquet has no way to the middle of a row group."""

    def __init__(self, path: Path, columns: tuple[str, ...]) -> None:
        self._file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        self._columns = list(columns)
        sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._file.metadata.num_row_groups)]
        self._begins = [sum(sizes[:group]) for group in range(len(sizes))]
        self._group = -1
        self._batches: Iterator[Any] = iter(())
        self._batch: Any = None
        self._next = 0
        """Row behind ``_batch``."""

    def read(self, start: int, stop: int) -> Iterator[Any]:
        """Yield record batches with the rows from ``start`` to ``stop``."""
        while start < stop:
            group = bisect_right(self._begins, start) - 1
            here = self._next - (0 if self._batch is None else self._batch.num_rows)
            if group != self._group or start < here:
                self._group, self._batch, self._next = group, None, self._begins[group]
                self._batches = self._file.iter_batches(
                    BLOCK_ROWS, row_groups=[group], columns=self._columns, use_threads=False
                )
            while start >= self._next:
                self._batch = next(self._batches)
                self._next += self._batch.num_rows
            offset = self._batch.num_rows - (self._next - start)
            taken = self._batch.slice(offset, min(stop, self._next) - start)
            start += taken.num_rows
            yield taken


_cursors: dict[tuple[Path, tuple[str, ...]], _Cursor] = {}
"""Open files of this process, least recently used first.  Only one thread of a process may read Parquet files."""


def _batches(path: Path, columns: tuple[str, ...], start: int, stop: int) -> Iterator[Any]:
    cursor = _cursors.pop((path, columns), None) or _Cursor(path, columns)
    while len(_cursors) >= _MAX_CURSORS:
        del _cursors[next(iter(_cursors))]
    yield from cursor.read(start, stop)
    _cursors[path, columns] = cursor


def _values(batch: Any) -> list[dict[str, Any] | str]:
    """Return the rows of a batch; text in place of a row that has no Python value, such as broken UTF-8."""
    try:
        return list(batch.to_pylist(maps_as_pydicts="lossy"))
    except (ValueError, OverflowError, pyarrow.ArrowException) as error:
        if batch.num_rows == 1:
            return [f"not readable: {str(error).splitlines()[0]}"]
        return [value for place in range(batch.num_rows) for value in _values(batch.slice(place, 1))]


def _converted(place: int, value: dict[str, Any] | str) -> RawRow:
    if isinstance(value, str):
        return RawRow(place=place, line=None, fault=value)
    found = {}
    for key, content in value.items():
        try:
            found[key] = _json(content)
        except TypeError as error:
            return RawRow(place=place, line=None, fault=f'key "{key}" must be a JSON value, got {error}')
    return RawRow(place=place, line=None, found=found)


def _json(value: Any) -> Any:
    """Return the JSON value: text for dates and decimals, null for NaN.  Raises TypeError with the type's name."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta | uuid.UUID):
        return str(value)
    raise TypeError(type(value).__name__)
