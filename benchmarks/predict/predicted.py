"""Simulates what ``sync_vs_async.py`` measured, arrangement by arrangement.

The same answers (drawn from the seed, by row and place), the same warm-up, the same number of steps from the same
start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.sim.model.costs import Costs
from asyncrl.sim.model.workload import Workload
from asyncrl.sim.model.world import Schedule, Setting, simulate
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.arrangements import arrangement, first_row
from benchmarks.sync_vs_async.figures import ArrangementRun, Setup
from benchmarks.sync_vs_async.files import read
from benchmarks.sync_vs_async.workload import ForcedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One arrangement, all its repeats together; trained tokens per second."""

    arrangement: str
    num_steps: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return self.simulated / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shifted:
    """``Lengths`` of a run whose prompts begin at ``first``."""

    forced: ForcedWorkload
    first: int

    @property
    def cut(self) -> int:
        """See ``Lengths.cut``."""
        return self.forced.longest

    def tokens(self, row: int, index: int) -> int:
        """See ``Lengths.tokens``."""
        return self.forced.length(self.first + row, index)

    def with_seed(self, seed: int) -> "_Shifted":
        """See ``Lengths.with_seed``: these are drawn already."""
        return self


def predicted(setup: Setup, runs: Sequence[ArrangementRun], costs: Costs) -> list[Predicted]:
    """Every arrangement that can be simulated, in order of its first run.  Raises ConfigError."""
    by_name: dict[str, list[ArrangementRun]] = {}
    for run in runs:
        if run.steps and _is_modelled(run.arrangement):
            by_name.setdefault(run.arrangement, []).append(run)
    return [_predicted(name, setup, mine, costs) for name, mine in by_name.items()]


def ratio(one: Predicted, base: Predicted) -> Predicted:
    """The same of the ratios to ``base``."""
    return replace(one, measured=one.measured / base.measured, simulated=one.simulated / base.simulated)


def results_of(file: Path) -> tuple[Setup, tuple[ArrangementRun, ...]]:
    """What one call measured.  Raises ConfigError."""
    results, _ = read([file])
    return results.setup, results.runs


def _is_modelled(name: str) -> bool:
    """Trainer and engines in turns on the same GPUs, for one, are not."""
    return name in ("sync", "one-step") or name.startswith("S=")


def _predicted(name: str, setup: Setup, runs: Sequence[ArrangementRun], costs: Costs) -> Predicted:
    found = [simulate(setting_of(setup, run, costs)) for run in runs]
    seconds = [each.step_s * len(run.steps) for each, run in zip(found, runs, strict=True)]
    tokens = [each.trained_per_s * time for each, time in zip(found, seconds, strict=True)]
    return Predicted(
        arrangement=name,
        num_steps=sum(len(run.steps) for run in runs),
        measured=sum(run.trained for run in runs) / fsum(run.seconds for run in runs),
        simulated=fsum(tokens) / fsum(seconds),
    )


def setting_of(setup: Setup, run: ArrangementRun, costs: Costs) -> Setting:
    """The run as the harness made it, up to the last step that was measured.  Raises ConfigError."""
    kind = arrangement(run.arrangement)
    lengths = _Shifted(forced=_forced(setup, run.seed), first=first_row(kind, setup.groups))
    try:
        return Setting(
            schedule=Schedule(staleness=kind.staleness, interval=1, collects_before_push=kind.collects_before_push),
            costs=replace(costs, engine=replace(costs.engine, max_running=setup.slots)),
            workload=Workload(lengths=lengths, prompt_tokens=setup.prompt_tokens, grain=1),
            gpus=setup.gpus,
            rollout_gpus=setup.engine_gpus,
            gpus_per_engine=1,
            slots_per_engine=setup.slots,
            groups_per_step=setup.groups,
            group_size=setup.group_size,
            steps=len(run.steps),
            warm_up=len(run.rows) - len(run.steps),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _forced(setup: Setup, seed: int) -> ForcedWorkload:
    return ForcedWorkload(
        vocabulary=SHAPES[setup.model]["vocab_size"],
        prompt_tokens=setup.prompt_tokens,
        median=setup.median,
        longest=setup.longest,
        seed=seed,
    )
