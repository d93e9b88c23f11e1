"""The shortest history of a failure: faults are dropped one after the other while the same oracle still fails."""

from collections.abc import Sequence
from pathlib import Path

from asyncrl.sim.faults.life import Outcome, live
from asyncrl.sim.faults.world.plan import Fault, Setting


def shrunk(setting: Setting, faults: Sequence[Fault], oracle: str, scratch: Path) -> tuple[Fault, ...]:
    """Return a subset of ``faults`` of which none can be left out.  ``faults`` break the oracle."""
    left, has_dropped = list(faults), True
    while has_dropped:
        has_dropped = False
        for fault in [*left]:
            fewer = [each for each in left if each is not fault]
            if _breaks(live(setting, fewer, scratch), oracle):
                left, has_dropped = fewer, True
    return tuple(left)


def history(setting: Setting, faults: Sequence[Fault], scratch: Path) -> Outcome:
    """Live once more with all events."""
    return live(setting, faults, scratch, is_traced=True)


def _breaks(outcome: Outcome, oracle: str) -> bool:
    return outcome.violation is not None and outcome.violation.oracle == oracle
