"""Admission: whether another group may start.  Pure arithmetic on a state of the run, without a clock."""

from dataclasses import dataclass

ROUNDING = 1e-9
"""Relative tolerance for float rounding: 6 groups at an acceptance rate of 4 / 6 must count as 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on the work in flight."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    """Largest lag of a trained token, in steps."""
    num_steps: int
    """Steps of the whole run.  No group is started that no step is left to train."""
    over_sampling: int | None = None
    """Most groups in flight per ``groups_per_step`` wanted groups; None: the acceptance rate decides."""
    buffer_size: int | None = None
    """Most groups in the buffer, including those in flight that the filter will keep; None: staleness decides."""

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
    """The state of the run that admission depends on."""

    batches_taken: int
    """Batches that the trainer has taken so far, including the one in training."""
    buffered: int
    """Groups in the buffer."""
    in_flight: int
    """Groups in flight that are not overdue."""
    engine_step: int
    """Step of the weights that the engines serve."""
    free_slots: int
    """Slots that no sample claims."""
    acceptance: float = 1.0
    """Upper estimate of the acceptance rate, above 0 and at most 1."""


def may_start(state: AdmissionState, limits: Limits) -> bool:
    """Return whether a group may start: it is wanted, the buffer has room, and its first sample gets a slot."""
    has_room = limits.buffer_size is None or _expected(state) <= limits.buffer_size * (1 + ROUNDING)
    return state.free_slots > 0 and has_room and is_wanted(state, limits)


def is_wanted(state: AdmissionState, limits: Limits) -> bool:
    """Return whether a group started now would find a place in a batch in time.

    Let T be the batches taken, w the step of the engines' weights, B the groups per step, S the maximum staleness and
    p the acceptance rate.  A group started now can be trained by step w + S iff

        T·B + buffered + p · (in flight with this one) <= (w + S + 1)·B

    Without a filter p is 1, and the bound holds by construction.
    """
    last_step = min(state.engine_step + limits.max_staleness + 1, limits.num_steps)
    places = (last_step - state.batches_taken) * limits.groups_per_step
    return _expected(state) <= places * (1 + ROUNDING)


def _expected(state: AdmissionState) -> float:
    """Return the groups expected in the buffer if one more starts."""
    return state.buffered + state.acceptance * (state.in_flight + 1)


def assumed_acceptance(estimate: float, limits: Limits, *, drops: bool) -> float:
    """Return the p of ``is_wanted``: the estimate, bounded below by B / ``over_sampling``.

    If unfinished groups are dropped (``drops``), p is at most B / ``over_sampling``, so that all over-sampled groups
    start, filter or not.  The first groups to finish then make the batch, as in slime.
    """
    if limits.over_sampling is None:
        return estimate
    floor = limits.groups_per_step / limits.over_sampling
    return min(estimate, floor) if drops else max(estimate, floor)
