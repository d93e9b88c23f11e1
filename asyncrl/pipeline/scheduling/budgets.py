"""The failure budgets: how many groups may fail or be rejected in a row before the run ends."""

from collections import Counter
from dataclasses import dataclass

from asyncrl.errors import AsyncRLError, FailureBudgetSpent, FilterBudgetSpent
from asyncrl.outages import OUTAGE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits on failed groups, filtered groups and silence, after which the run ends."""

    max_failed_groups: int
    """Groups that may fail in a row."""
    max_filtered_groups: int
    """Groups that the filter may reject in a row, or the buffer filter may drop or leave since the last batch."""
    watchdog_timeout_s: float
    """Seconds without any token or finished group while a batch is waited for."""
    reward_outage_s: float = OUTAGE_S
    """Seconds for which an outage of the rewards' service is waited out while a batch is waited for."""


class Streaks:
    """Counters of groups in a row that failed or were rejected."""

    def __init__(self, budgets: Budgets) -> None:
        self._budgets = budgets
        self._failed = 0
        self._filtered: Counter[str] = Counter()

    def kept(self) -> None:
        """Record a group that was scored and kept; reset both counters."""
        self._failed = 0
        self._filtered.clear()

    def filtered(self, reason: str) -> None:
        """Record a rejected group.  Raises FilterBudgetSpent, with the most frequent reason, if the budget is spent."""
        self._failed = 0
        self._filtered[reason] += 1
        in_a_row = self._filtered.total()
        if in_a_row >= self._budgets.max_filtered_groups:
            why, count = self._filtered.most_common(1)[0]
            raise FilterBudgetSpent(
                f"the filter rejected {in_a_row} groups in a row (max-filtered-groups), {count} of them for {why!r}"
            )

    def unpicked(self, num_dropped: int, num_waiting: int) -> None:
        """Check a buffer filter that picked too few groups.

        Raises FilterBudgetSpent if ``num_dropped`` + ``num_waiting`` groups spend the budget.
        """
        if num_dropped + num_waiting >= self._budgets.max_filtered_groups:
            raise FilterBudgetSpent(
                f"the buffer filter made no batch of {num_dropped + num_waiting} groups (max-filtered-groups): it "
                f"dropped {num_dropped} and left {num_waiting} waiting"
            )

    def failed(self, error: AsyncRLError) -> None:
        """Record a failed group.  Raises FailureBudgetSpent if the budget is spent."""
        self._failed += 1
        if self._failed >= self._budgets.max_failed_groups:
            raise FailureBudgetSpent(
                f"{self._failed} groups failed in a row (max-failed-groups); the last: {error}"
            ) from error
