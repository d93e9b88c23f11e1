"""Simulations of the arrangements that ``benchmarks.sync_vs_async`` measured.

A simulation has the same answers (drawn from the seed, by row and place), the same warm-up, and the same number of
steps from the same start.
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
    """Measured and simulated rate of one arrangement over all its repeats, in trained tokens per second."""

    arrangement: str
    num_steps: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """The error, as a share of the measured rate."""
        return self.simulated / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shifted:
    """``AnswerLengths`` of a run whose prompts start at row ``first``."""

    forced: ForcedWorkload
    first: int

    @property
    def cut(self) -> int:
        """See ``AnswerLengths.cut``."""
        return self.forced.longest

    def tokens(self, row: int, index: int) -> int:
        """See ``AnswerLengths.tokens``."""
        return self.forced.length(self.first + row, index)

    def with_seed(self, seed: int) -> "_Shifted":
        """See ``AnswerLengths.with_seed``; returns itself, since the seed is part of the run."""
        return self


def predicted(setup: Setup, runs: Sequence[ArrangementRun], costs: Costs) -> list[Predicted]:
    """Predictions of all arrangements that can be simulated, in order of their first runs.  Raises ConfigError."""
    by_name: dict[str, list[ArrangementRun]] = {}
    for run in runs:
        if run.steps and _is_modelled(run.arrangement):
            by_name.setdefault(run.arrangement, []).append(run)
    return [_predicted(name, setup, mine, costs) for name, mine in by_name.items()]


def ratio(one: Predicted, base: Predicted) -> Predicted:
    """The ratios of both rates to those of ``base``."""
    return replace(one, measured=one.measured / base.measured, simulated=one.simulated / base.simulated)


def results_of(file: Path) -> tuple[Setup, tuple[ArrangementRun, ...]]:
    """Setup and runs of a ``results.json``.  Raises ConfigError."""
    results, _ = read([file])
    return results.setup, results.runs


def _is_modelled(name: str) -> bool:
    """Whether the arrangement can be simulated.  Trainer and engines on the same GPUs, for one, cannot."""
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
    """The setting of the run, up to its last measured step.  Raises ConfigError."""
    kind = arrangement(run.arrangement)
    lengths = _Shifted(forced=_forced(setup, run.seed), first=first_row(kind, setup.groups))
    try:
        return Setting(
            schedule=Schedule(
                staleness=kind.staleness, interval=1, collects_before_publish=kind.collects_before_publish
            ),
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
