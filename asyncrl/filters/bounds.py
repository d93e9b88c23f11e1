"""Filters that drop groups whose rewards or lengths are out of bounds.

Bounds are inclusive; the reason names the violated bound.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from asyncrl.types import FinishReason, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardBounds:
    """Keep a group whose mean reward is between ``low`` and ``high``: neither too hard nor too easy."""

    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        _in_order(self.low, self.high)

    def __call__(self, group: ScoredGroup, /) -> str | None:
        """See ``KeepFn``."""
        return _out_of_bounds("reward", fmean(scored.reward for scored in group.samples), self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBounds:
    """Keep a group whose longest, shortest or mean answer has between ``low`` and ``high`` generated tokens."""

    low: float = 0
    high: float = math.inf
    of: Literal["longest", "shortest", "mean"] = "longest"

    def __post_init__(self) -> None:
        _in_order(self.low, self.high)
        if self.of not in _LENGTHS:
            raise ValueError(f"of must be one of {', '.join(_LENGTHS)}, got {self.of!r}")

    def __call__(self, group: ScoredGroup, /) -> str | None:
        """See ``KeepFn``."""
        length = _LENGTHS[self.of](scored.sample.num_generated for scored in group.samples)
        return _out_of_bounds(f"{self.of}_length", length, self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedShare:
    """Keep a group if the share of its answers cut at the length limit is at most ``high``, which is 0 to 1."""

    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.high <= 1:
            raise ValueError(f"high must be 0 to 1, got {self.high!r}")

    def __call__(self, group: ScoredGroup, /) -> str | None:
        """See ``KeepFn``."""
        share = fmean(scored.sample.finish is FinishReason.LENGTH for scored in group.samples)
        return _out_of_bounds("truncated", share, 0, self.high)


_LENGTHS: dict[str, Callable[[Iterable[int]], float]] = {"longest": max, "shortest": min, "mean": fmean}


def _in_order(low: float, high: float) -> None:
    if not low <= high:
        raise ValueError(f"low {low!r} must not be above high {high!r}")


def _out_of_bounds(name: str, value: float, low: float, high: float) -> str | None:
    if value < low:
        return f"{name}_below_{low:g}"
    return f"{name}_above_{high:g}" if value > high else None
