"""What the defaults must show, checked by ``benchmarks/simulate.py --check``."""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.sim.policies import ONE_STEP, SYNC
from asyncrl.sim.search import Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target."""

    text: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def verdicts(found: Mapping[str, Found], filtered: Mapping[str, Found], ideal: float) -> tuple[Verdict, ...]:
    """Every target whose policies were run.  ``filtered``: the same with a filter that rejects half of the groups."""
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
        with_masked = found["mask S=2"].outcome.in_batches_per_s
        text = f"mask S=2, share of the ideal, its {found['mask S=2'].outcome.masked:.0%} masked tokens counted"
        speed.append(Verdict(text=text, value=with_masked / ideal, limit=0.9))
    waste = [
        Verdict(text=f"{name}, half rejected: waste", value=each.outcome.waste, limit=0.02, at_most=True)
        for name, each in filtered.items()
    ]
    return (*speed, *waste)
