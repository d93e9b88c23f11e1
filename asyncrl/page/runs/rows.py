"""The rows of ``metrics.jsonl`` as columns, read on while the run appends to it."""

import math
from collections.abc import Iterator
from pathlib import Path

import orjson

type Points = tuple[list[int], list[float]]
"""Steps in ascending order, and the value of each."""

_BLOCK_BYTES = 8 * 1024 * 1024


class Rows:
    """The newest row of every training step.

    A resumed run repeats steps; the later row is valid.  A number that a row lacks, or that is not finite, has no
    point.  Not safe to call from two threads at once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._columns: dict[str, dict[int, float]] = {}
        self.num_torn = 0
        """Lines that are no row."""
        self.num_replaced = 0
        """Rows of steps that were trained again, and files that were replaced."""

    def update(self) -> bool:
        """Read what was appended since the last call, and return whether anything was.  Raises OSError.

        A missing file has no rows.  A file that was replaced is read again from its beginning.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset, self._columns = found.st_ino, 0, {}
            self.num_replaced += 1
        before = self._offset
        for line in self._new_lines():
            self._add(line)
        return self._offset > before

    def names(self) -> list[str]:
        """Return the names of all numbers."""
        return sorted(self._columns)

    def steps(self) -> list[int]:
        """Return all steps that have a row."""
        return sorted(self._columns.get("step", ()))

    def points(self, name: str) -> Points:
        """Return the steps that have this number, with its values."""
        column = self._columns.get(name, {})
        steps = sorted(column)
        return steps, [column[step] for step in steps]

    def last(self, name: str) -> float | None:
        """Return the number in the newest step that has it."""
        column = self._columns.get(name)
        return column[max(column)] if column else None

    def number(self, name: str, step: int) -> float | None:
        """Return one number of one step."""
        return self._columns.get(name, {}).get(step)

    def at(self, step: int) -> dict[str, float]:
        """Return all numbers of one step."""
        return {name: column[step] for name, column in self._columns.items() if step in column}

    def _new_lines(self) -> Iterator[bytes]:
        """Yield whole lines; the rest of a line that is being written is left for the next call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            rest = b""
            while block := file.read(_BLOCK_BYTES):
                whole, end, rest = (rest + block).rpartition(b"\n")
                self._offset += len(whole) + len(end)
                yield from whole.split(b"\n") if end else ()

    def _add(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
            step = int(row["step"])
        except (KeyError, TypeError, ValueError):
            self.num_torn += 1
            return
        if step in self._columns.get("time/step_s", ()) and "time/step_s" in row:
            self.num_replaced += 1  # the step was trained again, after a resumption
            for column in self._columns.values():
                column.pop(step, None)
        for name, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._columns.setdefault(name, {})[step] = value
