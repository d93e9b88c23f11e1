"""The blocks of all files, and the address of every row.

    address   0 ........................ extent of file 0 ...................... + extent of file 1
              place in file 0            place in file 1

Nothing here grows with the number of rows.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from asyncrl.data.raw_rows import PromptFile, RawRow


class LineCounts:
    """The lines before each block of a file, known for a block once all earlier blocks were read."""

    def __init__(self, num_blocks: int) -> None:
        self._counts = array("i", [-1]) * num_blocks
        """Lines of each block, -1 until it was read."""
        self._before = array("q", [0])
        """Lines before each block, for the first blocks of the file up to one that was not read."""

    def note(self, block: int, num_lines: int) -> None:
        """Record the lines of a block that was read."""
        self._counts[block] = num_lines
        while (known := len(self._before) - 1) < len(self._counts) and self._counts[known] >= 0:
            self._before.append(self._before[known] + self._counts[known])

    def before(self, block: int) -> int | None:
        """Return the lines before a block; None if an earlier block was not read."""
        return self._before[block] if block < len(self._before) else None


class BlockTable:
    """Blocks are numbered over all files, in the order of the files."""

    def __init__(self, files: Sequence[PromptFile]) -> None:
        self.files = tuple(files)
        self._first_blocks = [0, *accumulate(file.num_blocks for file in files)]
        self._first_addresses = [0, *accumulate(file.extent for file in files)]
        self._lines = [LineCounts(file.num_blocks) for file in files]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return self._first_blocks[-1]

    def locate(self, block: int) -> tuple[int, int]:
        """Return the file of a block, and its number in the file."""
        file = bisect_right(self._first_blocks, block) - 1
        return file, block - self._first_blocks[file]

    def address(self, block: int, place: int) -> int:
        """Return the address of the row at ``place`` in the file of ``block``."""
        return self._first_addresses[self.locate(block)[0]] + place

    def block_of(self, address: int) -> int:
        """Return the block that holds the row.  Raises KeyError."""
        file, place = self._place(address)
        block = self.files[file].block_of(place)
        if not 0 <= block < self.files[file].num_blocks:
            raise KeyError(address)
        return self._first_blocks[file] + block

    def read_row(self, address: int) -> RawRow:
        """Read one row.  Raises KeyError, DataError or OSError."""
        file, place = self._place(address)
        return self.files[file].row_at(place)

    def note_lines(self, block: int, num_lines: int) -> None:
        """Record the number of lines of a block that was read."""
        file, number = self.locate(block)
        self._lines[file].note(number, num_lines)

    def where(self, block: int, place: int, line: int | None) -> str:
        """Return file and row for an error line; ``line`` counts within the block.

        Names the line if all blocks before this one were read, else the offset.
        """
        number, block_in_file = self.locate(block)
        file, before = self.files[number], self._lines[number].before(block_in_file)
        if line is not None:
            is_known = file.lines_before is not None and before is not None
            line = line + (file.lines_before or 0) + (before or 0) if is_known else None
        return file.where(place, line)

    def _place(self, address: int) -> tuple[int, int]:
        file = bisect_right(self._first_addresses, address) - 1
        if not 0 <= file < len(self.files):
            raise KeyError(address)
        return file, address - self._first_addresses[file]
