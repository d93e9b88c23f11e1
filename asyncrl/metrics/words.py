"""Numbers as text for a person.  Pure functions."""

import math
from collections.abc import Sequence
from typing import Literal

_BLOCKS = "▁▂▃▄▅▆▇█"

WAITING_SHARE = 0.1
"""Waits below this share of the time are not reported: the jitter of one step is of that size."""


def share(part: float, whole: float) -> float:
    """``part`` divided by ``whole``; 0 if ``whole`` is 0."""
    return part / whole if whole > 0 else 0.0


def percent(value: float) -> str:
    """A share, 0 to 1, as ``63 %``.  Shares just above 0 or below 1 become ``<1 %`` and ``>99 %``."""
    if 0 < value < 0.005:
        return "<1 %"
    if 0.995 <= value < 1:
        return ">99 %"
    return f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """Seconds as ``9:48`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_s(seconds: float) -> str:
    """A short time with about three digits: ``0.012 s``, ``1.2 s``, ``130 s``."""
    digits = 3 if seconds < 0.1 else 2 if seconds < 1 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f} s"


def change(first: float, last: float, margin: float | None, arrow: str = "→") -> str:
    """Two means as ``0.125 → 0.500 ± 0.040``; one mean if they are equal.  ``margin`` is that of the last."""
    means = f"{last:.3f}" if first == last else f"{first:.3f} {arrow} {last:.3f}"
    return means if margin is None else f"{means} ± {margin:.3f}"


def sparkline(values: Sequence[float]) -> str:
    """One block per value, scaled from the lowest value to the highest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if low == high:
        return _BLOCKS[3] * len(finite)
    return "".join(_BLOCKS[round((value - low) / (high - low) * (len(_BLOCKS) - 1))] for value in finite)


def bottleneck(
    trainer_waited: float, engines_idle: float
) -> Literal["rollout-bound", "trainer-bound", "taking turns", "overlapped"]:
    """The side that waits for the other, in a word, from the two shares of the time."""
    if trainer_waited >= WAITING_SHARE:
        return "taking turns" if engines_idle >= WAITING_SHARE else "rollout-bound"
    return "trainer-bound" if engines_idle >= WAITING_SHARE else "overlapped"


def who_waits(trainer_waited: float, engines_idle: float) -> str:
    """``bottleneck`` with its reason: ``rollout-bound: the trainer waited 63 %``."""
    word = bottleneck(trainer_waited, engines_idle)
    trainer, engines = percent(trainer_waited), percent(engines_idle)
    reasons = {
        "rollout-bound": f"the trainer waited {trainer}",
        "trainer-bound": f"the engines were idle {engines}",
        "taking turns": f"trainer waited {trainer}, engines {engines}",
        "overlapped": f"trainer waited {trainer}, engines {engines}",
    }
    return f"{word}: {reasons[word]}"
