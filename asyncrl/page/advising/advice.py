"""The result of a study, as it travels from its process to the page and into ``advice.json``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The replay of the run by the calibrated simulator.  Times are seconds per step."""

    error: float
    """Simulated time over measured time, minus 1."""
    num_steps: int
    """Steps that were compared."""
    stretch: int
    """Steps that were replayed."""
    measured_s: float
    simulated_s: float
    measured_median_s: float
    simulated_median_s: float
    sample_error: float
    step_error: float
    prompt_tokens: int
    is_prompt_measured: bool
    """Whether ``prompt_tokens`` comes from the run's samples; otherwise it is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One setting and what the simulator says about it."""

    name: str
    staleness: int
    interval: int
    slots: int
    """Samples in flight per engine."""
    rollout_gpus: int
    trainer_gpus: int
    trained_per_s: float
    """Trained tokens per second."""
    times_now: float
    """The same, divided by that of the run's own setting."""
    step_s: float
    trainer_idle: float
    """Share of the time in which the trainer waits."""
    slots_filled: float
    lag_mean: float
    lag_max: int
    masked: float
    """Share of the tokens that are left out of the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The result of a study."""

    replay: Replay
    now: Simulated
    """The run's own setting."""
    rows: Sequence[Simulated]
    """The best setting of each policy."""
    lines: Sequence[str]
    split: str
    """A sentence about the split of the GPUs."""
    computed: float
    """Seconds since 1970."""
    seconds: float
    """Duration of the study."""
    num_steps: int = 0
    """Steps that the run had; the study itself does not count them."""

    @classmethod
    def of(cls, found: Any) -> Self:
        """Return the advice that ``found``, from JSON, describes.  Raises TypeError or KeyError if it is none.

        Unknown entries, of another version of asyncrl, are left out.
        """
        parts = {
            "replay": Replay(**_known(Replay, found["replay"])),
            "now": Simulated(**_known(Simulated, found["now"])),
            "rows": [Simulated(**_known(Simulated, row)) for row in found["rows"]],
        }
        return cls(**_known(cls, found) | parts)


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in found.items() if name in names}
