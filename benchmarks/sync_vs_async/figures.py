"""What was measured, and what follows from it: arithmetic alone, on values that go to JSON and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import fsum, inf, sqrt
from statistics import fmean, median, stdev
from typing import Any

from asyncrl.metrics.facts import TokenCounts

_T95: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t, two-sided 95 %, for 1 to 30 degrees of freedom; any table of statistics has it."""
ENOUGH_REPEATS = 3
"""From so many on the spread over repeats says more than the spread over steps: with two, t is 12.7."""
FULL_FROM = 2
"""Staleness from which on engines need not wait for the trainer, so that their rate is their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What must be the same for two runs to be compared."""

    model: str
    device: str
    trainer_gpus: int
    engine_gpus: int
    """One engine each."""
    slots: int
    """Samples in flight per engine."""
    groups: int
    """Per step."""
    group_size: int
    median: int
    longest: int
    prompt_tokens: int
    max_tokens_per_gpu: int
    parallel: Mapping[str, Any]
    """How the trainer is split, where it is not the default."""
    updates_beside_training: bool | None = None
    """As asked for; None: where there is room."""

    @property
    def gpus(self) -> int:
        """In all."""
        return self.trainer_gpus + self.engine_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One measured training step."""

    step_s: float
    train_s: float
    trained: int
    """Tokens."""
    lag_max: int
    lag_tokens: int
    """Lag times trained tokens, added up."""
    pause_s: float
    update_s: float
    logprob_diff: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrangementRun:
    """One arrangement, from the end of its warm-up to the end of its last step.  Tokens are counted from its start."""

    arrangement: str
    staleness: int
    seed: int
    """Of its prompts and lengths; another one for each repeat."""
    is_complete: bool
    """Whether it was measured for as long as asked."""
    steps: tuple[StepFigures, ...]
    before: TokenCounts
    after: TokenCounts
    seconds: float
    trainer_busy_s: float
    """Union of the times in which a step was trained."""
    engines_busy_s: float
    """Union of the times in which any request was in flight and no update held it."""
    request_s: float
    """Of all requests together."""
    aborted: int
    """Requests given up or interrupted."""
    num_engines: int | None = None
    """Where it is not the setup's: trainer and engines in turns on all GPUs."""
    rows: tuple[Mapping[str, float], ...] = ()
    """Every number of every step, the warm-up's included, by the names of docs/metrics.md."""

    @staticmethod
    def of(found: Mapping[str, Any]) -> "ArrangementRun":
        """From JSON."""
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
    """A mean, and half of its 95 % confidence interval; infinite when there is only one value."""

    mean: float
    half: float

    @property
    def share(self) -> float:
        """Half of the interval over the mean."""
        return self.half / self.mean if self.mean else inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """What the same GPUs could do if none ever idled.  Tokens per second."""

    trainer_gpus: int
    engine_gpus: int
    """What the two rates are of: the split's GPUs, or all of them where nothing but sync-colocate was measured."""
    trainer_rate: float
    """Of all trainer GPUs together, while they train: the best arrangement's trained tokens / seconds in train()."""
    engine_rate: float
    """Of all engines together, while they are full: measured alone, or the best arrangement's while they have work."""
    split: float
    """At this split of the GPUs the slower side decides."""
    pooled: float
    """All useful GPU-seconds divided by GPUs: as if each GPU could do both, or the split were the best one."""


def ideal(runs: Sequence[ArrangementRun], full_rate: float | None, setup: Setup) -> Ideal:
    """From the runs, and the rate of full engines if that was measured.  Raises ValueError when nothing was trained."""
    split = [run for run in runs if not is_colocated(run, setup) and run.steps]
    gpus = (setup.trainer_gpus, setup.engine_gpus) if split else (setup.gpus, setup.gpus)
    runs = split or list(runs)
    trainer = max((run.trained / run.trainer_busy_s for run in runs if run.trainer_busy_s > 0), default=0.0)
    full = [run for run in runs if run.staleness >= FULL_FROM] or runs
    seen = max((run.generated / run.engines_busy_s for run in full if run.engines_busy_s > 0), default=0.0)
    engines = max(full_rate or 0.0, seen)
    if not (trainer and engines):
        raise ValueError("no run has both trained and generated")
    return Ideal(
        trainer_gpus=gpus[0],
        engine_gpus=gpus[1],
        trainer_rate=trainer,
        engine_rate=engines,
        split=min(trainer, engines),
        pooled=setup.gpus / (gpus[0] / trainer + gpus[1] / engines),
    )


def is_colocated(run: ArrangementRun, setup: Setup) -> bool:
    """Whether its GPUs both trained and generated."""
    return run.num_engines not in (None, setup.engine_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that was measured with one setup."""

    setup: Setup
    runs: tuple[ArrangementRun, ...]
    full_rates: tuple[float, ...] = ()
    """Tokens per second of all engines with every slot taken, each time that it was measured."""

    @property
    def by_arrangement(self) -> dict[str, list[ArrangementRun]]:
        """Those with at least one step, in order of their first appearance."""
        found: dict[str, list[ArrangementRun]] = {}
        for run in self.runs:
            if run.steps:
                found.setdefault(run.arrangement, []).append(run)
        return found

    @property
    def figures(self) -> dict[str, "Figures"]:
        """Of each arrangement, by its name."""
        return {name: figures(runs, self.setup) for name, runs in self.by_arrangement.items()}

    @property
    def ideal(self) -> Ideal:
        """Raises ValueError when nothing was trained."""
        return ideal(self.runs, fmean(self.full_rates) if self.full_rates else None, self.setup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One arrangement, over all of its runs.  Shares go from 0 to 1, pauses are in seconds."""

    arrangement: str
    is_colocated: bool
    """All GPUs did both: there is no split."""
    num_runs: int
    num_steps: int
    is_complete: bool
    rate: Spread
    """Trained tokens per second."""
    step_s: Spread
    trainer_idle: float
    engines_idle: float
    """Of the time: no request at all, or all of them held by an update."""
    slots_filled: float
    lag_mean: float
    lag_max: int
    pause_median_s: float
    pause_max_s: float
    tokens: TokenCounts
    """Within the measured time; ``held`` is what is held at its end less what was held at its beginning."""
    aborted: int
    logprob_diff: float | None


def figures(runs: Sequence[ArrangementRun], setup: Setup) -> Figures:
    """Of the runs of one arrangement, each with at least one step."""
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
    """Of independent values."""
    if len(values) < 2:
        return Spread(mean=values[0], half=inf)
    return Spread(mean=fmean(values), half=t95(len(values) - 1) * stdev(values) / sqrt(len(values)))


def ratio_spread(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of sum over sum, pair by pair: tokens per second, where long steps have more tokens (Cochran, 1977, 6.4)."""
    ratio, size = fsum(above) / fsum(below), len(above)
    if size < 2:
        return Spread(mean=ratio, half=inf)
    squares = fsum((tokens - ratio * time) ** 2 for tokens, time in zip(above, below, strict=True))
    return Spread(mean=ratio, half=t95(size - 1) * sqrt(squares / (size - 1) / size) / fmean(below))


def t95(degrees: int) -> float:
    """Student's t, two-sided 95 %."""
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.96 + 2.4 / degrees  # right to 0.003 from 30 on


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
