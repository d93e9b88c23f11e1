"""Whether another group may start: arithmetic on a snapshot, without a clock."""

from dataclasses import dataclass

ROUNDING = 1e-9
"""6 groups at an acceptance of 4 / 6 are 4, whatever the last bit says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the work in flight."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    """No trained token is older than this many steps."""
    num_steps: int
    """Of the whole run; nothing is started that no step is left to train."""
    over_sampling: int | None = None
    """Most groups in flight for every ``groups_per_step`` wanted; None: as the acceptance rate asks."""
    buffer_size: int | None = None
    """Most groups that wait to be trained, those in flight that will join them included; None: as staleness allows."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "group_size", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {self.max_staleness}")
        for name in ("over_sampling", "buffer_size"):
            size = getattr(self, name)
            if size is not None and size < self.groups_per_step:
                raise ValueError(f"{name} must be at least groups_per_step {self.groups_per_step}, got {size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """Where the run stands."""

    batches_taken: int
    """Batches the trainer has taken so far, the one in training included."""
    buffered: int
    """Groups that wait to be trained."""
    in_flight: int
    """Groups in flight that are not overdue yet."""
    engine_step: int
    """Training steps that made the weights the engines serve."""
    free_slots: int
    """Slots that nobody holds or waits for."""
    acceptance: float = 1.0
    """Upper estimate of the share of groups that are kept, above 0 and at most 1."""


def may_start(state: AdmissionState, limits: Limits) -> bool:
    """Whether a group may start now: one is wanted, the buffer has room, and a slot is free for its first sample."""
    has_room = limits.buffer_size is None or _expected(state) <= limits.buffer_size * (1 + ROUNDING)
    return state.free_slots > 0 and has_room and is_wanted(state, limits)


def is_wanted(state: AdmissionState, limits: Limits) -> bool:
    """Whether a group started now would find a place in a batch in time.

    With T batches taken and engines on weights of step w, a group started now can be trained by step w + S, one batch
    of B groups per step, iff T·B + buffered + p · (in flight with this one) <= (w + S + 1)·B.  p is 1 without a filter,
    and the bound then holds by construction.
    """
    last_step = min(state.engine_step + limits.max_staleness + 1, limits.num_steps)
    places = (last_step - state.batches_taken) * limits.groups_per_step
    return _expected(state) <= places * (1 + ROUNDING)


def _expected(state: AdmissionState) -> float:
    """Groups that will wait to be trained if one more starts."""
    return state.buffered + state.acceptance * (state.in_flight + 1)


def assumed_acceptance(estimate: float, limits: Limits, *, drops: bool) -> float:
    """The p of ``is_wanted``: the estimate, kept at what ``over_sampling`` allows.

    Where unfinished groups are dropped (``drops``) the over-sampling asked for is started in any case, filter or not:
    the first to finish make the batch, as in slime.
    """
    if limits.over_sampling is None:
        return estimate
    floor = limits.groups_per_step / limits.over_sampling
    return min(estimate, floor) if drops else max(estimate, floor)
