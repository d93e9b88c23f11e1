"""The numbers of all steps so far, as rules read them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

type Row = Mapping[str, float | int | None]
"""The numbers of one step by name, as in ``metrics.jsonl``; None or missing if a number does not exist."""


class _Column:
    """All values of one number, with their steps."""

    __slots__ = ("least", "most", "steps", "values")

    def __init__(self, first: float) -> None:
        self.values: list[float] = []
        self.steps: list[int] = []
        self.least = self.most = first


class History:
    """Numbers by name, in the order of the steps.  A step that lacks a number has no value of it."""

    def __init__(self, is_read: Callable[[str], bool], update_interval: int = 1) -> None:
        """``is_read``: whether any rule reads the number with this name; others are not kept."""
        self.update_interval = update_interval
        """Steps between two weight updates."""
        self._is_read = is_read
        self._columns: dict[str, _Column] = {}
        self.step = -1
        """The newest step."""

    def add(self, step: int, row: Row) -> None:
        """Add the numbers of the next step."""
        self.step = step
        for name, value in row.items():
            if value is None:
                continue
            column = self._columns.get(name)
            if column is None:
                if not self._is_read(name):
                    continue
                column = self._columns[name] = _Column(value)
            column.values.append(value)
            column.steps.append(step)
            if value < column.least:
                column.least = value
            elif value > column.most:
                column.most = value

    def has(self, name: str) -> bool:
        """Whether the newest step has this number; of a name that ends with a slash, any number that begins like it."""
        if name.endswith("/"):
            return bool(self.names(name, ""))
        column = self._columns.get(name)
        return column is not None and column.steps[-1] == self.step

    def values(self, name: str) -> Sequence[float]:
        """Return all values, the newest last."""
        column = self._columns.get(name)
        return () if column is None else column.values

    def steps(self, name: str) -> Sequence[int]:
        """Return the steps of ``values``."""
        column = self._columns.get(name)
        return () if column is None else column.steps

    def bounds(self, name: str) -> tuple[float, float]:
        """Return the smallest and the largest value so far.  There must be one."""
        column = self._columns[name]
        return column.least, column.most

    def now(self, name: str) -> float | None:
        """Return the value of the newest step."""
        return self._columns[name].values[-1] if self.has(name) else None

    def names(self, before: str, after: str) -> Sequence[str]:
        """Return the names of numbers of the newest step that begin and end like this."""
        return [
            name
            for name, column in self._columns.items()
            if name.startswith(before) and name.endswith(after) and column.steps[-1] == self.step
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

    def increase(self, name: str, count: int) -> float | None:
        """Return by how much a counter grew over the last ``count`` values, like ``growth``.

        A counter that falls has begun again at 0, because the run was resumed.
        """
        values = self.values(name)[-1 - count :]
        rises = (after - before if after >= before else after for before, after in pairwise(values))
        return sum(rises) if len(values) > count else None
