"""Targets that the defaults must meet, checked by ``benchmarks.simulate --check``."""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.sim.model.result import SimulationResult
from asyncrl.sim.search.policies import ONE_STEP, SYNC
from asyncrl.sim.search.scale import Scaled
from asyncrl.sim.search.search import SearchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target, or a figure shown for comparison with one."""

    text: str
    value: float
    limit: float | None = None
    """The required value; None: the figure is only shown."""
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the target is met; True for a figure that is only shown."""
        if self.limit is None:
            return True
        return self.value <= self.limit if self.at_most else self.value >= self.limit


_TAKEN = 0.99
"""Share of the slots that must be taken: one of 100 may be between two samples."""
_DECODING = 0.95
"""Share of the slots that must be decoding: generation pauses for 1.3 of some 90 s at each update."""
_REAL_TIME = 1.0


def scale_verdicts(scaled: Scaled) -> tuple[Verdict, ...]:
    """Targets of ``--scale``: the engines were full, and the simulation was faster than real time."""
    return (
        Verdict(
            text="share of the slots taken, least of the ends of steps",
            value=min(scaled.in_flight) / scaled.num_slots,
            limit=_TAKEN,
        ),
        Verdict(text="share of the slots decoding, mean", value=scaled.decoding / scaled.num_slots, limit=_DECODING),
        Verdict(text="simulated over wall seconds", value=scaled.ratio, limit=_REAL_TIME),
    )


def verdicts(
    found: Mapping[str, SearchResult], filtered: Mapping[str, SearchResult], ideal: float
) -> tuple[Verdict, ...]:
    """All targets whose policies were run.  ``filtered``: the same with a filter that rejects half of the groups."""
    rates = {name: each.outcome.trained_per_s for name, each in found.items()}
    ratios = [("wait S=2", SYNC, 2.5), ("wait S=2", ONE_STEP, 2.0), ("wait S=4", SYNC, 3.5)]
    speed = [
        Verdict(text=f"{ours}, times {theirs}", value=rates[ours] / rates[theirs], limit=limit)
        for ours, theirs, limit in ratios
        if ours in rates and theirs in rates
    ]
    if "wait S=8" in rates:
        speed.append(Verdict(text="wait S=8, share of the ideal", value=rates["wait S=8"] / ideal, limit=0.9))
    if "mask S=2" in rates:
        speed += _masking("mask S=2", found["mask S=2"].outcome, ideal)
    waste = [
        Verdict(text=f"{name}, half rejected: waste", value=each.outcome.waste, limit=0.02, at_most=True)
        for name, each in filtered.items()
    ]
    return (*speed, *waste)


def _masking(name: str, result: SimulationResult, ideal: float) -> list[Verdict]:
    """The target counts all tokens of trained groups; the cost of the mask is shown with it."""
    all_tokens, unmasked = result.in_batches_per_s / ideal, result.trained_per_s / ideal
    return [
        Verdict(text=f"{name}, share of the ideal, all tokens of trained groups", value=all_tokens, limit=0.9),
        Verdict(text=f"{name}, share of these tokens that is masked", value=result.masked),
        Verdict(text=f"{name}, share of the ideal, unmasked tokens alone", value=unmasked),
    ]
