"""The filter's acceptance rate.  Admission uses its upper estimate, so that enough groups start and few too many."""

import math
from collections import deque
from collections.abc import Iterable

WINDOW = 256
"""Number of last verdicts in the estimate: within 0.06 at a rate of 0.5, and up to date within a few steps."""
DEVIATIONS = 2.0
"""Standard deviations of the upper estimate above the observed rate; it is below the true rate once in 44 windows."""


class Acceptance:
    """The running share of groups that the filter keeps."""

    def __init__(self, verdicts: Iterable[bool] = ()) -> None:
        """Start from ``verdicts``, the last ones of the run that this one resumes."""
        self._verdicts: deque[bool] = deque(verdicts, maxlen=WINDOW)
        self._kept = sum(self._verdicts)

    @property
    def verdicts(self) -> tuple[bool, ...]:
        """The last verdicts, oldest first."""
        return tuple(self._verdicts)

    def note(self, kept: bool) -> None:
        """Record a verdict: whether the filter kept the group."""
        if len(self._verdicts) == WINDOW:
            self._kept -= self._verdicts[0]
        self._verdicts.append(kept)
        self._kept += kept

    @property
    def rate(self) -> float:
        """Share of kept groups among the last verdicts; 1 before the first verdict."""
        return self._kept / len(self._verdicts) if self._verdicts else 1.0

    @property
    def upper(self) -> float:
        """Upper end of Wilson's score interval (Wilson 1927, eq. 4): above 0, and 1 while no group was rejected."""
        n = len(self._verdicts)
        if self._kept == n:
            return 1.0
        z, p = DEVIATIONS, self._kept / n
        middle = p + z * z / (2 * n)
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return min(1.0, (middle + spread) / (1 + z * z / n))
