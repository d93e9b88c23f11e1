"""The rows of ``metrics.jsonl`` as columns, read on while the run appends to it.

A column is made when a view first asks for it: a run reports a hundred numbers, of which the overview draws thirty.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import orjson

type Points = tuple[list[int], list[float]]
"""Steps in ascending order, and the value of each."""

_BLOCK_BYTES = 8 * 1024 * 1024
_NUMBERS = (int, float)
_TRAINED = "time/step_s"
"""A number of every row of a trained step; a row without it adds to its step."""


class Rows:
    """The newest row of every training step.

    A run trains its steps in order.  A trained step that is not later than the one before is the first of a resumed
    run: it replaces its own row and all later ones, whose training was lost.  A number that a row lacks, or that is not
    finite, has no point.  Not safe to call from two threads at once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0
        self._rows: dict[int, Mapping[str, Any]] = {}
        self._names: set[str] = set()
        self._columns: dict[str, Points] = {}
        """The columns that were asked for since the last change."""
        self._newest: int | None = None
        """The step of the last row of a trained step."""
        self._has_resumed = False
        """Whether a resumed run has replaced rows."""
        self.num_torn = 0
        """Lines that are no row."""
        self.num_replaced = 0
        """Resumptions at a step that was trained before, and files that were replaced."""

    def update(self) -> bool:
        """Read what was appended since the last call, and return whether anything was.  Raises OSError.

        A missing file has no rows.  A file that was replaced is read again from its beginning.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset, self._rows, self._newest = found.st_ino, 0, {}, None
            self._has_resumed = False
            self._names.clear()
            self._columns.clear()
            self.num_replaced += 1
        before, num_replaced = self._offset, self.num_replaced
        for line in self._new_lines():
            self._add(line)
        if self.num_replaced > num_replaced:
            self._names = {name for row in self._rows.values() for name in row if _is_number(row[name])}
        if self._offset > before:
            self._columns.clear()
        return self._offset > before

    @property
    def last_step(self) -> int | None:
        """The newest trained step of a run that repeated steps: files of later steps are left from its former life.

        None if no step was repeated; a file may then be there before its row.
        """
        return self._newest if self._has_resumed else None

    def names(self) -> list[str]:
        """Return the names of all numbers."""
        return sorted(self._names)

    def steps(self) -> list[int]:
        """Return all steps that have a row."""
        return sorted(self._rows)

    def points(self, name: str) -> Points:
        """Return the steps that have this number, with its values."""
        if name not in self._names:
            return [], []
        if name not in self._columns:
            steps = self.steps()
            found: list[Any] = [self._rows[step].get(name) for step in steps]
            if all(map(_is_number, found)):
                self._columns[name] = steps, found
            else:
                numbers = [(step, value) for step, value in zip(steps, found, strict=True) if _is_number(value)]
                self._columns[name] = [step for step, _ in numbers], [value for _, value in numbers]
        return self._columns[name]

    def last(self, name: str) -> float | None:
        """Return the number in the newest step that has it."""
        values = self.points(name)[1]
        return values[-1] if values else None

    def number(self, name: str, step: int) -> float | None:
        """Return one number of one step."""
        value = self._rows.get(step, {}).get(name)
        return value if _is_number(value) else None

    def at(self, step: int) -> dict[str, float]:
        """Return all numbers of one step."""
        return {name: value for name, value in self._rows.get(step, {}).items() if _is_number(value)}

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
        if _TRAINED in row:
            if self._newest is not None and step <= self._newest:  # after a resumption
                self._rows = {each: kept for each, kept in self._rows.items() if each < step}
                self._has_resumed = True
                self.num_replaced += 1
            self._newest = step
        if (before := self._rows.get(step)) is not None:
            row = {**before, **{name: value for name, value in row.items() if _is_number(value)}}
        self._rows[step] = row
        self._names.update(name for name in row.keys() - self._names if _is_number(row[name]))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, _NUMBERS) and math.isfinite(value)
