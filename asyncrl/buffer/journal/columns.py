"""Numbers as raw bytes, one column after another; the lengths are in the header of the record.

All numbers are little-endian, as on every machine that the engines run on.
"""

from array import array
from collections.abc import Buffer, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import Floats

NUMBERS_AT_ONCE = 8192
"""Numbers that one step converts, in 0.1 ms: the thread may pause after each step."""

ONES, ZEROS, BITS, BYTES = "ones", "zeros", "bits", "bytes"
"""Forms of a loss mask: all 1, all 0, eight values per byte, or one value per byte."""


class ColumnWriter:
    """Columns on their way to a file.  Methods that are generators yield between steps of work."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.num_bytes = 0

    def raw(self, data: Buffer) -> int:
        """Append bytes and return their number."""
        num_bytes = len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        self.buffers.append(data)
        self.num_bytes += num_bytes
        return num_bytes

    def ids(self, values: Sequence[int]) -> Iterator[None]:
        """Append token ids of 4 bytes.  Raises OverflowError for a negative or too large one."""
        for start in range(0, len(values), NUMBERS_AT_ONCE):
            self.raw(array("I", values[start : start + NUMBERS_AT_ONCE]))
            yield

    def floats(self, values: Floats) -> None:
        """Append numbers of 4 bytes."""
        self.raw(values if isinstance(values, array) and values.typecode == "f" else array("f", values))

    def doubles(self, values: Sequence[float]) -> None:
        """Append numbers of 8 bytes, which keep NaN."""
        self.raw(array("d", values))

    def mask(self, values: Sequence[int]) -> str:
        """Append a loss mask and return its form."""
        num_ones = values.count(1)
        if num_ones == len(values):
            return ONES
        if num_ones + (num_zeros := values.count(0)) < len(values):
            self.raw(bytes(values))
            return BYTES
        if num_zeros == len(values):
            return ZEROS
        self.raw(np.packbits(np.frombuffer(bytes(values), np.uint8)))
        return BITS

    def numbers(self, values: NDArray[Any]) -> list[Any]:
        """Append an array and return its type and shape."""
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        self.raw(np.ascontiguousarray(little).reshape(-1).view(np.uint8))
        return [little.dtype.str, *values.shape]


class ColumnReader:
    """Columns in the order in which they were written.  Raises ValueError if bytes are missing."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def raw(self, num_bytes: int) -> memoryview:
        """Return the next bytes."""
        found = self._data[self._at : self._at + num_bytes]
        if len(found) != num_bytes:
            raise ValueError(f"{num_bytes} bytes are expected, and {len(found)} are left")
        self._at += num_bytes
        return found

    def ids(self, count: int) -> tuple[int, ...]:
        """Return token ids."""
        return tuple(np.frombuffer(self.raw(4 * count), "<u4").tolist())

    def floats(self, count: int) -> Floats:
        """Return numbers of 4 bytes."""
        found = array("f")
        found.frombytes(self.raw(4 * count))
        return found

    def doubles(self, count: int) -> list[float]:
        """Return numbers of 8 bytes."""
        return list(np.frombuffer(self.raw(8 * count), "<f8").tolist())

    def mask(self, form: str, count: int) -> tuple[int, ...]:
        """Return a loss mask of ``count`` tokens."""
        if form in (ONES, ZEROS):
            return (int(form == ONES),) * count
        if form == BYTES:
            return tuple(self.raw(count))
        bits = np.frombuffer(self.raw(-(-count // 8)), np.uint8)
        return tuple(np.unpackbits(bits, count=count).tolist())

    def numbers(self, form: Sequence[Any]) -> NDArray[Any]:
        """Return an array that may be written to, because torch warns of others."""
        kind, *shape = form
        dtype = np.dtype(kind)
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.raw(dtype.itemsize * count), dtype).reshape(shape).copy()
