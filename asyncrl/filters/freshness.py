"""A buffer filter by age.  It runs when a batch is picked, because only then is the training step known."""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.types import GroupId, Picked, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Fresh:
    """Pick the oldest groups, but drop those with a trained token whose lag would exceed ``max_lag`` steps."""

    max_lag: int

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be at least 0, got {self.max_lag!r}")

    def __call__(self, step: int, waiting: Sequence[ScoredGroup], size: int, /) -> Picked:
        """See ``PickFn``."""
        fresh: list[GroupId] = []
        drop: dict[GroupId, str] = {}
        for group in waiting:
            oldest = group.oldest_trained_step
            if oldest is not None and step - oldest > self.max_lag:
                drop[group.group_id] = f"lag_above_{self.max_lag}"
            else:
                fresh.append(group.group_id)
        return Picked(train=tuple(fresh[:size]), drop=drop)
