"""Arrays that grow at their end."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

type Array = npt.NDArray[Any]
type Floats = npt.NDArray[np.float64]

_FIRST = 4096


class Columns:
    """Arrays of the same length.

    Invariant: entries below the length never change, and one thread appends.  A view that another thread got stays
    valid while the columns grow, because growing copies them.
    """

    def __init__(self, **types: str) -> None:
        self._arrays: Mapping[str, Array] = {name: np.empty(_FIRST, kind) for name, kind in types.items()}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, values: Mapping[str, Any], count: int) -> None:
        """Add ``count`` entries to each column."""
        needed = self._length + count
        room = next(len(array) for array in self._arrays.values())
        if needed > room:
            self._arrays = {name: _grown(array, max(needed, room * 3 // 2)) for name, array in self._arrays.items()}
        for name, array in self._arrays.items():
            array[self._length : needed] = values[name]
        self._length = needed

    def view(self) -> dict[str, Array]:
        """Return all entries, without copying them."""
        return {name: array[: self._length] for name, array in self._arrays.items()}


def _grown(array: Array, room: int) -> Array:
    grown = np.empty(room, array.dtype)
    grown[: len(array)] = array
    return grown
