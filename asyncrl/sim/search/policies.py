"""The compared policies by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.sim.model.world import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """A way to schedule work.  The search picks the best of its ``schedules``."""

    name: str
    schedules: tuple[Schedule, ...]

    @property
    def is_ours(self) -> bool:
        """Whether asyncrl's flags can select this policy."""
        return self.name not in ("one-step", "abort-restart")


SYNC = "sync"
ONE_STEP = "one-step"
ABORT_RESTART = "abort-restart"


def policies(
    stalenesses: Sequence[int], masked: Sequence[int], intervals: Sequence[int]
) -> Mapping[str, SchedulingPolicy]:
    """Policies of others, then ours: ``wait`` at each of ``stalenesses`` and ``mask`` at each of ``masked``.

    Each may publish after any of ``intervals`` steps that its staleness allows.
    """
    others = (
        SchedulingPolicy(name=SYNC, schedules=(Schedule(staleness=0, interval=1),)),
        SchedulingPolicy(name=ONE_STEP, schedules=(Schedule(staleness=1, interval=1, collects_before_publish=True),)),
        SchedulingPolicy(name=ABORT_RESTART, schedules=_each("drop", 1, intervals)),
    )
    ours = (
        *(
            SchedulingPolicy(name=f"wait S={staleness}", schedules=_each("wait", staleness, intervals))
            for staleness in stalenesses
        ),
        *(
            SchedulingPolicy(name=f"mask S={staleness}", schedules=_each("mask", staleness, intervals))
            for staleness in masked
        ),
    )
    return {policy.name: policy for policy in (*others, *ours)}


def _each(stale: str, staleness: int, intervals: Sequence[int]) -> tuple[Schedule, ...]:
    allowed = [interval for interval in intervals if interval <= staleness + 1] or [1]
    if stale == "drop":
        return tuple(
            Schedule(staleness=interval, interval=interval, stale="drop", update_mode="abort") for interval in allowed
        )
    return tuple(
        Schedule(staleness=staleness, interval=interval, stale="mask" if stale == "mask" else "wait")
        for interval in allowed
    )
