"""Results of a simulated run: rates over its measured steps, without warm-up and end."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from asyncrl.metrics.facts import StepFacts, TokenCounts
from asyncrl.metrics.reporter import trained_lags
from asyncrl.sim.model.decoding import DecodedWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """State of a run at the end of a step; counts since its start, in units."""

    at_s: float = 0.0
    tokens: TokenCounts = field(default_factory=TokenCounts)
    work: DecodedWork = field(default_factory=DecodedWork)
    trainer_busy_s: float = 0.0
    lag_tokens: int = 0
    """Sum of lag times trained tokens over this step's batch."""
    lag_max: int = 0

    @staticmethod
    def at(now: float, facts: StepFacts, work: DecodedWork, trainer_busy_s: float) -> "Mark":
        """The mark of a step that ended at ``now``."""
        lags = list(trained_lags(facts.batch))
        return Mark(
            at_s=now,
            tokens=facts.scheduler.tokens,
            work=work,
            trainer_busy_s=trainer_busy_s,
            lag_tokens=sum(lag * units for lag, units in lags),
            lag_max=max((lag for lag, _ in lags), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Rates and shares.  Tokens are real tokens, shares range from 0 to 1."""

    trained_per_s: float
    """Tokens per second that reached a loss."""
    step_s: float
    """Mean seconds per step."""
    step_times_s: tuple[float, ...]
    """Seconds of each step."""
    trainer_idle: float
    """Share of the time in which the trainer did not train."""
    engines_idle: float
    """Share of the engines' time without any request, pauses included."""
    slots_filled: float
    """Requests decoded at once, divided by the most that slots and engines allow."""
    lag_mean: float
    """Mean lag of trained tokens, in steps."""
    lag_max: int
    masked: float
    """Share of the tokens in batches that were left out of the loss."""
    filtered: float
    """Share of the generated tokens in groups that the filter rejected: intended, so not counted as waste."""
    stale: float
    """Share of the generated tokens dropped as too old."""
    failed: float
    """Share of the generated tokens lost with groups that failed."""
    recomputed: float
    """Tokens prefilled again, divided by generated tokens."""

    @property
    def in_batches_per_s(self) -> float:
        """Tokens per second in trained batches, including tokens left out of the loss."""
        return self.trained_per_s / (1 - self.masked)

    @property
    def waste(self) -> float:
        """Share of the generated tokens wasted: stale and failed.  Masked tokens, in trained groups, do not count."""
        return self.stale + self.failed


def outcome(marks: Sequence[Mark], *, grain: int, num_engines: int, batch: int) -> SimulationResult:
    """Rates between the first mark and the last.  ``batch``: requests that an engine may decode at once."""
    first, last = marks[0], marks[-1]
    seconds = last.at_s - first.at_s
    trained, masked = last.tokens.trained - first.tokens.trained, last.tokens.masked - first.tokens.masked
    generated = last.tokens.generated - first.tokens.generated
    times = tuple(after.at_s - before.at_s for before, after in pairwise(marks))
    return SimulationResult(
        trained_per_s=grain * trained / seconds,
        step_s=seconds / len(times),
        step_times_s=times,
        trainer_idle=1 - (last.trainer_busy_s - first.trainer_busy_s) / seconds,
        engines_idle=1 - (last.work.busy_s - first.work.busy_s) / seconds / num_engines,
        slots_filled=(last.work.request_s - first.work.request_s) / seconds / num_engines / batch,
        lag_mean=sum(mark.lag_tokens for mark in marks[1:]) / max(1, trained),
        lag_max=max(mark.lag_max for mark in marks[1:]),
        masked=masked / max(1, trained + masked),
        filtered=(last.tokens.filtered - first.tokens.filtered) / generated,
        stale=(last.tokens.stale - first.tokens.stale) / generated,
        failed=(last.tokens.failed - first.tokens.failed) / generated,
        recomputed=(last.work.recomputed - first.work.recomputed) / generated,
    )


def mean(outcomes: Sequence[SimulationResult]) -> SimulationResult:
    """The mean of each field over runs that differ in their seed; ``lag_max`` is the maximum."""
    shares = {
        name: sum(getattr(each, name) for each in outcomes) / len(outcomes)
        for name in SimulationResult.__slots__
        if name not in ("lag_max", "step_times_s")
    }
    return replace(outcomes[0], lag_max=max(each.lag_max for each in outcomes), **shares)
