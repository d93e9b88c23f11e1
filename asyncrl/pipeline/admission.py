"""Whether another group may start: arithmetic on a snapshot, without a clock."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the work in flight."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    """No trained token is older than this many steps."""
    num_steps: int
    """Of the whole run; nothing is started that no step is left to train."""
    slots: int
    """Samples in flight."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "num_steps", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {self.max_staleness}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where the run stands."""

    batches_taken: int
    """Batches the trainer has taken so far, the one in training included."""
    outstanding: int
    """Groups in flight or buffered."""
    engine_step: int
    """Training steps that made the weights the engines serve."""
    free_slots: int
    """Slots that nobody holds or waits for."""


def groups_wanted(standing: Standing, limits: Limits) -> int:
    """How many more groups may start now (0 or more).

    With T batches taken and engines on weights of step w, every group started now can be trained by step w + S, one
    batch of B groups per step, iff T·B + outstanding < (w + S + 1)·B.  Every outstanding group counts in full: what a
    filter rejects is made up for as soon as it leaves, so the bound holds by construction.
    """
    last_step = min(standing.engine_step + limits.max_staleness + 1, limits.num_steps)
    room = (last_step - standing.batches_taken) * limits.groups_per_step - standing.outstanding
    return max(0, room)


def may_start(standing: Standing, limits: Limits) -> bool:
    """Whether a group may start now: one is wanted and a slot is free for its first sample."""
    return standing.free_slots > 0 and groups_wanted(standing, limits) > 0
