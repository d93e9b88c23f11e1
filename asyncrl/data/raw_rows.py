"""Rows as they are in a file, before their keys are looked at."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRow:
    """A row of a file, or the reason why it cannot be read."""

    place: int
    """Address of the row in its file: an offset in bytes, or a row number."""
    line: int | None
    """Line number from 1 in the block or the file that was read; None if it is not known."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the row."""
    fault: str | None = None
    """The reason in words; None if the row was read."""
    has_all_keys: bool = False
    """Whether objects have null for keys that only objects of other rows have, as in Parquet."""


class PromptFile(Protocol):
    """A file of rows, or a slice of one, divided into blocks that can be read in any order."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def first(self) -> int:
        """Place from which rows are read."""

    @property
    def stop(self) -> int:
        """Place behind the last row that is read."""

    @property
    def extent(self) -> int:
        """A number above every row's place."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""

    @property
    def lines_before(self) -> int | None:
        """Lines before the first block; None if they were not counted or the file has no lines."""

    def block_of(self, place: int) -> int:
        """Return the block that holds the row at ``place``."""

    def read(self, block: int) -> tuple[list[RawRow], int]:
        """Return the rows of a block, and the number of its lines.  Raises DataError or OSError."""

    def rows(self) -> Iterator[RawRow]:
        """Yield every row.  Raises DataError or OSError."""

    def row_at(self, place: int) -> RawRow:
        """Return the row at ``place``.  Raises KeyError if there is none, DataError or OSError."""

    def where(self, place: int, line: int | None) -> str:
        """Return file and row for an error line."""
