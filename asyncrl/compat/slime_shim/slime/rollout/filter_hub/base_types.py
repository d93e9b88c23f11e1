"""The result of a filter."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from asyncrl.compat.slime_types import DynamicFilterOutput

__all__ = ["DynamicFilterOutput", "MetricGatherer", "call_dynamic_filter", "should_drop_dynamic_filter_output"]


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Call a filter, and wrap a plain bool; without a filter, everything is kept."""
    output = DynamicFilterOutput(keep=True) if fn is None else fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=output)


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Return whether a group is dropped, although it may be one of the last candidates of a batch."""
    is_scarce = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not output.keep and not is_scarce


class MetricGatherer:
    """Counts the reasons of dropped groups."""

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count a dropped group."""
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        """Return the counts as metrics."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
