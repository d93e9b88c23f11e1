"""How much may go wrong in a row before the run ends."""

from collections import Counter
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError, FailureBudgetSpent, FilterBudgetSpent


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How much may go wrong, or nothing happen, before the run ends."""

    max_failed_groups: int
    """In a row."""
    max_filtered_groups: int
    """In a row; for a buffer filter, since the last batch."""
    watchdog_timeout_s: float
    """Without any token or group while a batch is waited for."""


class Streaks:
    """Groups in a row that came to nothing."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._failed = 0
        self._filtered: Counter[str] = Counter()

    def kept(self) -> None:
        """A group was scored and kept."""
        self._failed = 0
        self._filtered.clear()

    def filtered(self, reason: str) -> None:
        """A group was scored and rejected.  Raises FilterBudgetSpent, naming the reason that dominates."""
        self._failed = 0
        self._filtered[reason] += 1
        in_a_row = self._filtered.total()
        if in_a_row >= self._budgets.max_filtered_groups:
            why, count = self._filtered.most_common(1)[0]
            raise FilterBudgetSpent(
                f"the filter rejected {in_a_row} groups in a row (max-filtered-groups), {count} of them for {why!r}"
            )

    def unpicked(self, num_dropped: int, num_waiting: int) -> None:
        """A buffer filter makes no batch of the groups that wait.  Raises FilterBudgetSpent if there are very many."""
        if num_dropped + num_waiting >= self._budgets.max_filtered_groups:
            raise FilterBudgetSpent(
                f"the buffer filter made no batch of {num_dropped + num_waiting} groups (max-filtered-groups): it "
                f"dropped {num_dropped} and left {num_waiting} waiting"
            )

    def failed(self, error: AsyncRLError) -> None:
        """A group failed.  Raises FailureBudgetSpent."""
        self._failed += 1
        if self._failed >= self._budgets.max_failed_groups:
            raise FailureBudgetSpent(
                f"{self._failed} groups failed in a row (max-failed-groups); the last: {error}"
            ) from error
