"""Measurements, and the figures derived from them: pure arithmetic on values that are stored as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import fsum, inf, sqrt
from statistics import fmean, median, stdev
from typing import Any

from asyncrl.metrics.facts import TokenCounts
from benchmarks.common.shapes import SHAPES

_T95: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom, from any table of statistics."""
ENOUGH_REPEATS = 3
"""Least number of repeats for which the spread over repeats is used instead of that over steps: with two, t is 12.7."""
FULL_FROM = 2
"""Least staleness at which engines need not wait for the trainer, so that their rate is not limited by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings that two runs must share to be compared."""

    model: str
    device: str
    trainer_gpus: int
    engine_gpus: int
    """Number of engines, one GPU each."""
    slots: int
    """Samples in flight per engine."""
    groups: int
    """Groups per step."""
    group_size: int
    median: int
    longest: int
    prompt_tokens: int
    max_tokens_per_gpu: int
    parallel: Mapping[str, Any]
    """Flags of the trainer's layout that differ from the default."""
    updates_beside_training: bool | None = None
    """The flag as given; None: updates overlap training where memory allows."""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.trainer_gpus + self.engine_gpus

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return "num_experts" in SHAPES.get(self.model, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One measured training step."""

    step_s: float
    train_s: float
    trained: int
    """Trained tokens."""
    lag_max: int
    lag_tokens: int
    """Sum of lag times trained tokens."""
    pause_s: float
    update_s: float
    logprob_diff: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrangementRun:
    """One arrangement, from the end of its warm-up to the end of its last step.  Token counts start with the run."""

    arrangement: str
    staleness: int
    seed: int
    """Seed of its prompts and lengths; each repeat has another one."""
    is_complete: bool
    """Whether it was measured for as long as asked."""
    steps: tuple[StepFigures, ...]
    before: TokenCounts
    after: TokenCounts
    seconds: float
    trainer_busy_s: float
    """Seconds in which a step was trained."""
    engines_busy_s: float
    """Seconds in which any request was in flight and no update held it."""
    request_s: float
    """Seconds of all requests, summed."""
    aborted: int
    """Requests cancelled or interrupted."""
    num_engines: int | None = None
    """Number of engines if it differs from the setup's: training and generation alternate on all GPUs."""
    rows: tuple[Mapping[str, float], ...] = ()
    """Every number of every step, warm-up included, by the names of docs/metrics.md."""

    @staticmethod
    def of(found: Mapping[str, Any]) -> "ArrangementRun":
        """The run in parsed JSON."""
        parts = {"before": TokenCounts(**found["before"]), "after": TokenCounts(**found["after"])}
        steps = tuple(StepFigures(**step) for step in found["steps"])
        return ArrangementRun(**{**found, **parts, "steps": steps, "rows": tuple(found["rows"])})

    @property
    def trained(self) -> int:
        """Tokens that reached a loss."""
        return self.after.trained - self.before.trained

    @property
    def generated(self) -> int:
        """Tokens that engines delivered."""
        return self.after.generated - self.before.generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean, and half of its 95 % confidence interval, which is infinite for a single value."""

    mean: float
    half: float

    @property
    def share(self) -> float:
        """Half of the interval, divided by the mean."""
        return self.half / self.mean if self.mean else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """Rates of the same GPUs if none ever idled, in tokens per second."""

    trainer_gpus: int
    engine_gpus: int
    """GPUs of the two rates: the split's, or all of them if only sync-colocate was measured."""
    trainer_rate: float
    """Rate of all trainer GPUs while they train: the best arrangement's trained tokens / seconds in train()."""
    engine_rate: float
    """Rate of all engines while they are full: measured alone, or the best arrangement's while they have work."""
    split: float
    """Rate at this split of the GPUs: the slower side's."""
    pooled: float
    """All useful GPU-seconds divided by GPUs: as if each GPU could do both, or the split were the best one."""


def ideal(runs: Sequence[ArrangementRun], full_rate: float | None, setup: Setup) -> Ideal:
    """The ideal of the runs, and of ``full_rate`` if it was measured.  Raises ValueError when nothing was trained."""
    split = [run for run in runs if not is_colocated(run, setup) and run.steps]
    gpus = (setup.trainer_gpus, setup.engine_gpus) if split else (setup.gpus, setup.gpus)
    runs = split or list(runs)
    trainer = max((run.trained / run.trainer_busy_s for run in runs if run.trainer_busy_s > 0), default=0.0)
    full = [run for run in runs if run.staleness >= FULL_FROM] or runs
    seen = max((run.generated / run.engines_busy_s for run in full if run.engines_busy_s > 0), default=0.0)
    engines = max(full_rate or 0.0, seen)
    if not (trainer and engines):
        raise ValueError("no run has both trained and generated tokens")
    return Ideal(
        trainer_gpus=gpus[0],
        engine_gpus=gpus[1],
        trainer_rate=trainer,
        engine_rate=engines,
        split=min(trainer, engines),
        pooled=setup.gpus / (gpus[0] / trainer + gpus[1] / engines),
    )


def is_colocated(run: ArrangementRun, setup: Setup) -> bool:
    """Whether the run's GPUs both trained and generated."""
    return run.num_engines not in (None, setup.engine_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that was measured with one setup."""

    setup: Setup
    runs: tuple[ArrangementRun, ...]
    full_rates: tuple[float, ...] = ()
    """Tokens per second of all engines with every slot taken, once for each time it was measured."""

    @property
    def by_arrangement(self) -> dict[str, list[ArrangementRun]]:
        """Runs with at least one step, by arrangement in order of first appearance."""
        found: dict[str, list[ArrangementRun]] = {}
        for run in self.runs:
            if run.steps:
                found.setdefault(run.arrangement, []).append(run)
        return found

    @property
    def figures(self) -> dict[str, "Figures"]:
        """Figures of each arrangement, by name."""
        return {name: figures(runs, self.setup) for name, runs in self.by_arrangement.items()}

    @property
    def ideal(self) -> Ideal:
        """The ideal rates.  Raises ValueError when nothing was trained."""
        return ideal(self.runs, fmean(self.full_rates) if self.full_rates else None, self.setup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one arrangement over all of its runs.  Shares range from 0 to 1, pauses are in seconds."""

    arrangement: str
    is_colocated: bool
    """Whether all GPUs did both, so that there is no split."""
    num_runs: int
    num_steps: int
    is_complete: bool
    rate: Spread
    """Trained tokens per second."""
    step_s: Spread
    trainer_idle: float
    engines_idle: float
    """Share of the time without any request, or with all of them held by an update."""
    slots_filled: float
    lag_mean: float
    lag_max: int
    pause_median_s: float
    pause_max_s: float
    tokens: TokenCounts
    """Tokens in the measured time; ``held`` is the number at its end minus that at its start."""
    aborted: int
    logprob_diff: float | None


def figures(runs: Sequence[ArrangementRun], setup: Setup) -> Figures:
    """The figures of the runs of one arrangement, each with at least one step."""
    steps = [step for run in runs for step in run.steps]
    wall_s, num_engines = fsum(run.seconds for run in runs), runs[0].num_engines or setup.engine_gpus
    trained = sum(step.trained for step in steps)
    pauses = [step.pause_s for step in steps]
    differences = [step.logprob_diff for step in steps if step.logprob_diff is not None]
    return Figures(
        arrangement=runs[0].arrangement,
        is_colocated=is_colocated(runs[0], setup),
        num_runs=len(runs),
        num_steps=len(steps),
        is_complete=all(run.is_complete for run in runs),
        rate=_rate(runs, steps),
        step_s=_step_s(runs, steps),
        trainer_idle=1 - fsum(run.trainer_busy_s for run in runs) / wall_s,
        engines_idle=1 - fsum(run.engines_busy_s for run in runs) / wall_s,
        slots_filled=fsum(run.request_s for run in runs) / wall_s / num_engines / setup.slots,
        lag_mean=sum(step.lag_tokens for step in steps) / max(1, trained),
        lag_max=max(step.lag_max for step in steps),
        pause_median_s=median(pauses),
        pause_max_s=max(pauses),
        tokens=_ledger(runs),
        aborted=sum(run.aborted for run in runs),
        logprob_diff=fmean(differences) if differences else None,
    )


def spread(values: Sequence[float]) -> Spread:
    """The mean of independent values and its interval."""
    if len(values) < 2:
        return Spread(mean=values[0], half=inf)
    return Spread(mean=fmean(values), half=t95(len(values) - 1) * stdev(values) / sqrt(len(values)))


def ratio_spread(above: Sequence[float], below: Sequence[float]) -> Spread:
    """The ratio of the sums, for pairs of tokens and seconds: long steps have more tokens (Cochran, 1977, 6.4)."""
    ratio, size = fsum(above) / fsum(below), len(above)
    if size < 2:
        return Spread(mean=ratio, half=inf)
    squares = fsum((tokens - ratio * time) ** 2 for tokens, time in zip(above, below, strict=True))
    return Spread(mean=ratio, half=t95(size - 1) * sqrt(squares / (size - 1) / size) / fmean(below))


def t95(degrees: int) -> float:
    """Student's t for ``degrees`` degrees of freedom, two-sided 95 %."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.4 / degrees  # within 0.003 from 30 on


def _rate(runs: Sequence[ArrangementRun], steps: Sequence[StepFigures]) -> Spread:
    if len(runs) >= ENOUGH_REPEATS:
        return spread([run.trained / run.seconds for run in runs])
    return ratio_spread([step.trained for step in steps], [step.step_s for step in steps])


def _step_s(runs: Sequence[ArrangementRun], steps: Sequence[StepFigures]) -> Spread:
    if len(runs) >= ENOUGH_REPEATS:
        return spread([run.seconds / len(run.steps) for run in runs])
    return spread([step.step_s for step in steps])


def _ledger(runs: Sequence[ArrangementRun]) -> TokenCounts:
    names = [field.name for field in fields(TokenCounts)]
    return TokenCounts(
        **{name: sum(getattr(run.after, name) - getattr(run.before, name) for run in runs) for name in names}
    )
