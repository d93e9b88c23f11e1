"""JSONL files: one JSON object per line, addressed by the line's offset in bytes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from asyncrl.data import json_text
from asyncrl.data.raw_rows import RawRow
from asyncrl.errors import DataError

MAX_ROW_BYTES = 64 * 2**20
"""Bytes of a row, at most."""
BLOCK_BYTES = 64 * 2**10
"""Bytes of a block.  A line belongs to the block in which it begins."""
_BOM = b"\xef\xbb\xbf"
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlFile:
    """A range of whole lines of a file.  A row's place is the offset of its line."""

    path: Path
    first: int
    """Offset of the first line."""
    stop: int
    """Offset behind the last line."""
    lines_before: int | None
    """Lines before ``first``; None if they were not counted."""
    extent: int
    """Size of the whole file in bytes: every place is smaller."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks, known without reading."""
        return -(-(self.stop - self.first) // BLOCK_BYTES)

    def block_of(self, place: int) -> int:
        """Return the block of the row at ``place``."""
        return (place - self.first) // BLOCK_BYTES

    def read(self, block: int) -> tuple[list[RawRow], int]:
        """Return the rows of a block, and the number of its lines.  Raises DataError or OSError."""
        start = self.first + block * BLOCK_BYTES
        rows, num_lines = [], 0
        with self._opened() as handle:
            begin = _next_line(handle, start, self.first, BLOCK_BYTES)
            if begin is None:
                return [], 0
            for place, line in _lines(handle, begin, min(start + BLOCK_BYTES, self.stop)):
                num_lines += 1
                if _is_row(place, line):
                    rows.append(_parsed(place, num_lines, line))
        return rows, num_lines

    def rows(self) -> Iterator[RawRow]:
        """Yield every row; ``line`` counts from the beginning of the file if that is known.

        Raises DataError or OSError.
        """
        with self._opened() as handle:
            handle.seek(self.first)
            lines = enumerate(_lines(handle, self.first, self.stop), start=1 + (self.lines_before or 0))
            for number, (place, line) in lines:
                if _is_row(place, line):
                    yield _parsed(place, None if self.lines_before is None else number, line)

    def row_at(self, place: int) -> RawRow:
        """Return the row at ``place``.  Raises KeyError if no line begins there, DataError or OSError."""
        with self._opened() as handle:
            if self.first <= place < self.stop and _next_line(handle, place, self.first, 1) == place:
                for _, line in _lines(handle, place, place + 1):
                    return _parsed(place, None, line)
        raise KeyError(place)

    def where(self, place: int, line: int | None) -> str:
        """Return the position of a row for a person: the line if it is known, or else the offset."""
        return f"{self.path}:{line}" if line is not None else f"{self.path}, byte {place}"

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        """Open the file.  Raises DataError if it is shorter than it was, because rows would be missing."""
        with self.path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size < self.extent:
                raise DataError(
                    f"{self.path}: the file has {size} bytes, and had {self.extent} when the run started; "
                    "a file must not change during a run"
                )
            yield handle


def open_jsonl(path: Path, wanted: slice) -> JsonlFile:
    """Find the lines of the rows ``wanted``.  Reads only as much of either end as a slice needs.

    Raises DataError or OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as handle:
        _check_encoding(path, handle.read(4))
        first, before = _offset(handle, size, wanted.start or 0)
        stop = size if wanted.stop is None else _offset(handle, size, wanted.stop)[0]
    return JsonlFile(path=path, first=first, stop=max(first, stop), lines_before=before, extent=size)


def _check_encoding(path: Path, head: bytes) -> None:
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"PK\x03\x04", b"\xfd7zX")):
        raise DataError(f"{path}: the file is compressed; unpack it")
    if head == b"PAR1":
        raise DataError(f"{path}: a Parquet file; its name must end with .parquet")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or (b"\0" in head and len(head) == 4):
        raise DataError(f"{path}: UTF-16 or UTF-32 text; save it as UTF-8")


def _offset(handle: IO[bytes], size: int, number: int) -> tuple[int, int | None]:
    """Return the offset of a row, counted from the end if ``number`` is negative, and the number of lines before it."""
    if number == 0:
        return 0, 0
    if number > 0:
        rows_left = number
        handle.seek(0)
        for num_lines, (place, line) in enumerate(_lines(handle, 0, size)):
            is_row = _is_row(place, line)
            if is_row and rows_left == 0:
                return place, num_lines
            rows_left -= is_row
        return size, None
    tail = _CHUNK
    while True:
        start = max(0, size - tail)
        begin = _next_line(handle, start, 0, size)
        lines = _lines(handle, size if begin is None else begin, size)
        places = [place for place, line in lines if _is_row(place, line)]
        if len(places) >= -number:
            return places[number], None
        if start == 0:
            return 0, 0
        tail *= 2


def _next_line(handle: IO[bytes], start: int, first: int, within: int) -> int | None:
    """Move to the first line that begins in ``within`` bytes from ``start`` on; None if none begins there."""
    if start <= first:
        handle.seek(first)
        return first
    handle.seek(start - 1)
    position = start - 1
    while position < start + within - 1:
        piece = handle.readline(min(_CHUNK, start + within - 1 - position))
        position += len(piece)
        if piece.endswith(b"\n"):
            return position
        if not piece:
            return None
    return None


def _lines(handle: IO[bytes], position: int, stop: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield offset and bytes of the lines that begin before ``stop``; None in place of a line above MAX_ROW_BYTES."""
    while position < stop:
        line = handle.readline(MAX_ROW_BYTES + 1)
        if not line:
            return
        size = len(line)
        if size <= MAX_ROW_BYTES or line.endswith(b"\n"):
            yield position, line
        else:
            yield position, None
            while position + size < stop and not line.endswith(b"\n") and (line := handle.readline(_CHUNK)):
                size += len(line)
        position += size


def _is_row(place: int, line: bytes | None) -> bool:
    """Return whether a line is more than whitespace, and a byte order mark at the start of the file."""
    return line is None or bool((line.removeprefix(_BOM) if place == 0 else line).strip())


def _parsed(place: int, number: int | None, line: bytes | None) -> RawRow:
    if line is None:
        return RawRow(place=place, line=number, fault=f"the row has more than {MAX_ROW_BYTES >> 20} MiB")
    try:
        found = json_text.loads(line.removeprefix(_BOM) if place == 0 else line)
    except DataError as error:
        return RawRow(place=place, line=number, fault=str(error))
    if not isinstance(found, dict):
        what = json_text.kind(found)
        fault = f"must be a JSON object, got {what}; the file needs one object per line"
        return RawRow(place=place, line=number, fault=fault)
    return RawRow(place=place, line=number, found=found)
