"""The numbers of all steps so far, as rules read them."""

from collections.abc import Mapping, Sequence
from statistics import fmean

type Row = Mapping[str, float | int | None]
"""The numbers of one step by name, as in ``metrics.jsonl``; None or missing if a number does not exist."""


class History:
    """Numbers by name, in the order of the steps.  A step that lacks a number has no value of it."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._steps: dict[str, list[int]] = {}
        self._bounds: dict[str, tuple[float, float]] = {}
        self.step = -1
        """The newest step."""

    def add(self, step: int, row: Row) -> None:
        """Add the numbers of the next step."""
        self.step = step
        for name, value in row.items():
            if value is not None:
                self._values.setdefault(name, []).append(value)
                self._steps.setdefault(name, []).append(step)
                least, most = self._bounds.get(name, (value, value))
                self._bounds[name] = min(least, value), max(most, value)

    def values(self, name: str) -> Sequence[float]:
        """Return all values, the newest last."""
        return self._values.get(name, ())

    def steps(self, name: str) -> Sequence[int]:
        """Return the steps of ``values``."""
        return self._steps.get(name, ())

    def bounds(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value so far.  There must be one."""
        return self._bounds[name]

    def now(self, name: str) -> float | None:
        """Return the value of the newest step."""
        return self._values[name][-1] if self._steps.get(name, (None,))[-1] == self.step else None

    def names(self, before: str, after: str) -> Sequence[str]:
        """Return the names of numbers of the newest step that begin and end like this."""
        return [
            name
            for name, steps in self._steps.items()
            if steps[-1] == self.step and name.startswith(before) and name.endswith(after)
        ]

    def mean(self, name: str, count: int, *, ago: int = 0) -> float | None:
        """Return the mean of ``count`` values, without the ``ago`` newest; None if there are fewer."""
        values = self.values(name)
        end = len(values) - ago
        return fmean(values[end - count : end]) if end >= count else None

    def growth(self, name: str, count: int) -> float | None:
        """Return by how much a number grew over the last ``count`` values; None if there are not that many."""
        values = self.values(name)
        return values[-1] - values[-1 - count] if len(values) > count else None
