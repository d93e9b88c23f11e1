"""Parquet files, addressed by row number."""

import datetime
import decimal
import math
import pickle
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
BLOCK_BYTES = 256 * 2**10
"""Bytes of a block's rows, on average over a row group."""
_BUFFER_BYTES = 2**20
"""Bytes of a column that are read at once.  Without a buffer, Arrow loads a row group's whole column."""
SAMPLE_ROWS = 32
"""Rows of a file whose size is measured when it is opened."""
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
    row_bytes: int
    """Bytes of a row, on average over the first rows of the file."""
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
            for batch in _batches(self, start, stop):
                found += [_converted(start + len(found) + place, value) for place, value in enumerate(_values(batch))]
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.path}, rows {start} to {stop}: {str(error).splitlines()[0]}") from error
        return found


def open_parquet(path: Path, wanted: slice, data: DataConfig) -> ParquetFile:
    """Read the footer and a few rows.  Raises DataError if the file is not Parquet or lacks a column, or OSError."""
    try:
        with _opened(path) as handle:
            columns = _columns(tuple(handle.schema_arrow.names), data)
            row_bytes = _row_bytes(handle, columns)
            chunks = _chunks(handle.metadata, columns)
            groups = [handle.metadata.row_group(group) for group in range(handle.metadata.num_row_groups)]
            sizes = [(group.num_rows, _block_rows(group, chunks, row_bytes)) for group in groups]
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from error
    total = sum(num_rows for num_rows, _ in sizes)
    first, stop, _ = wanted.indices(total)
    return ParquetFile(
        path=path,
        first=first,
        stop=max(first, stop),
        extent=total,
        starts=_starts(sizes, first, stop),
        columns=columns,
        row_bytes=row_bytes,
    )


def _opened(path: Path) -> Any:
    return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)


def _columns(names: tuple[str, ...], data: DataConfig) -> tuple[str, ...]:
    """Return the columns of the keys; all columns if one is missing, so that the line of a broken row names them."""
    if {data.input_key, data.label_key} - {None, *names}:
        return names
    return tuple(name for name in names if name in (data.input_key, data.label_key, data.metadata_key, data.tool_key))


def _row_bytes(handle: Any, columns: tuple[str, ...]) -> int:
    """Return the mean size of the first rows, which a footer understates if many rows share a value."""
    with suppress(pyarrow.ArrowException):  # reading their block raises it again, with the rows' numbers
        for batch in handle.iter_batches(SAMPLE_ROWS, columns=list(columns), use_threads=False):
            sizes = [len(pickle.dumps(value)) for value in _values(batch)]
            return sum(sizes) // max(1, len(sizes))
    return 0


def _chunks(meta: Any, columns: tuple[str, ...]) -> tuple[int, ...]:
    """Return the numbers of the column chunks that hold ``columns``; a column of lists or objects has several."""
    roots = tuple(f"{name}." for name in columns)
    paths = [f"{meta.schema.column(number).path}." for number in range(meta.num_columns)]
    return tuple(number for number, path in enumerate(paths) if path.startswith(roots))


def _block_rows(group: Any, chunks: tuple[int, ...], row_bytes: int) -> int:
    """Return the number of rows of a row group's blocks, from the footer and the size of the file's first rows."""
    stored: int = sum(group.column(chunk).total_uncompressed_size for chunk in chunks)
    mean = max(row_bytes, stored // max(1, int(group.num_rows)), 1)
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // mean))


def _starts(sizes: Sequence[tuple[int, int]], first: int, stop: int) -> tuple[int, ...]:
    """Return the first row of each block, from the rows of each row group and of its blocks."""
    starts, begin = [], 0
    for size, block_rows in sizes:
        for start in range(begin, begin + size, block_rows):
            end = min(start + block_rows, begin + size)
            if first < end and start < stop:
                starts.append(max(start, first))
        begin += size
    return tuple(starts)


class _Cursor:
    """An open file that is read forwards, because Parquet has no way to the middle of a row group."""

    def __init__(self, file: ParquetFile) -> None:
        self._file = _opened(file.path)
        self._columns, self._row_bytes = list(file.columns), file.row_bytes
        self._chunks = _chunks(self._file.metadata, file.columns)
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
                num_rows = _block_rows(self._file.metadata.row_group(group), self._chunks, self._row_bytes)
                self._batches = self._file.iter_batches(
                    num_rows, row_groups=[group], columns=self._columns, use_threads=False
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


def _batches(file: ParquetFile, start: int, stop: int) -> Iterator[Any]:
    cursor = _cursors.pop((file.path, file.columns), None) or _Cursor(file)
    while len(_cursors) >= _MAX_CURSORS:
        del _cursors[next(iter(_cursors))]
    yield from cursor.read(start, stop)
    _cursors[file.path, file.columns] = cursor


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
    return RawRow(place=place, line=None, found=found, has_all_keys=True)


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
