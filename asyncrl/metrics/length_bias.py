"""The length-bias alarm: do long answers reach the trainer as often as short ones?  Arithmetic on histograms.

Started lengths are estimated by a life table (Kaplan and Meier, "Nonparametric estimation from incomplete
observations", JASA 53, 1958; in its actuarial form, by buckets).  A sample that ended by itself is an event; one that
was cut, or is still in flight, is censored at its present length.  A mean over finished samples would miss long ones.

The alarm concerns losses.  Slots and buffer are bounded, so a held sample is trained or lost in the end, and only
losses can bias the trained lengths for long.  So samples let through (trained or filtered) are compared with all
samples whose outcome is known: let through, dropped or cut.  Without losses the two distributions are the same.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.metrics.life_table import (
    NUM_BUCKETS,
    LengthSummary,
    added,
    bucket_of,
    distance,
    life_table,
    means,
    summary,
)

HALF_LIFE_STEPS = 20
"""Steps after which a sample has half its weight: long enough for a thousand groups at 32 per step, short enough to
follow lengths that drift over some hundred steps of training."""

ALPHA = 1e-4
"""Probability that chance alone exceeds the critical value: a run tests some 1,000 times."""

MARGIN = 1.2
"""A factor on the critical value, which is asymptotic and assumes known lengths; those of cut samples are estimated.
In 520 random histories without bias, tested 60 times each, the distance reached 0.87 of the critical value
(``tests/unit/metrics/length_histories.py``, seeds 0 to 39, losses of 2, 10 and 50 %)."""

MIN_EFFECT = 0.05
"""Smallest difference, of the distributions or of the mean lengths, that raises the alarm.  Chosen, not derived."""

_FORGET = 0.5 ** (1 / HALF_LIFE_STEPS)
_CRITICAL = MARGIN * math.sqrt(-math.log(ALPHA / 2) / 2)
"""Critical value of the two-sample Kolmogorov-Smirnov test, asymptotic, before the factor sqrt(1/n + 1/m)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Lengths of samples started and let through.  Counts cover the whole run; the rest weighs recent steps more."""

    finished: int
    """Samples that ended by themselves, whatever happened to them later."""
    cut: int
    """Samples stopped before their end: dropped, cancelled or failed."""
    trained: int
    filtered: int
    dropped: int
    """Samples that ended by themselves and were then dropped as stale or failed."""
    started: LengthSummary | None
    """Lengths of started samples, estimated with those in flight; None before any sample finished."""
    let_through: LengthSummary | None
    """Lengths of samples trained or filtered; None before the first."""
    fair: LengthSummary | None
    """Lengths that ``let_through`` would have without losses."""
    bias: float
    """Largest distance of the cumulative distributions of ``let_through`` and ``fair``, 0 to 1."""
    chance: float
    """Largest ``bias`` that chance explains if losses do not depend on length."""

    @property
    def mean_ratio(self) -> float:
        """Mean length of ``let_through``, divided by the mean length without losses; 1 without bias."""
        return self.let_through.mean / self.fair.mean if self.let_through and self.fair and self.fair.mean else 1.0

    @property
    def alarm(self) -> str | None:
        """One line if the lengths let through differ from ``fair`` by more than chance and MIN_EFFECT; else None."""
        if not self.let_through or not self.fair or self.bias <= self.chance:
            return None
        if max(self.bias, abs(1 - self.mean_ratio)) < MIN_EFFECT:
            return None
        differ = "shorter" if self.mean_ratio < 1 else "longer"
        return (
            f"length bias: answers let through are {abs(1 - self.mean_ratio):.0%} {differ} than those started "
            f"(mean {self.let_through.mean:.0f} instead of {self.fair.mean:.0f} tokens; distance {self.bias:.3f}, "
            f"chance explains {self.chance:.3f}); so far {self.cut} samples were cut short and {self.dropped} "
            "dropped at their end (see groups/stale, groups/failed)"
        )


class LengthBias:
    """Counts of samples by length and outcome.  Each counting method takes less than a microsecond."""

    def __init__(self, group_size: int) -> None:
        """``group_size`` is the number of samples per group; they are lost together, so chance counts groups."""
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self._group_size = group_size
        self._finished, self._cut, self._trained, self._filtered, self._dropped = (_Tally() for _ in range(5))
        self._grown = [0.0] * NUM_BUCKETS
        """Recent change of the number in flight with a length in this bucket."""
        self._in_flight: Counter[int] = Counter()
        """Samples in flight by bucket, at the last call of ``stats``."""

    def finished(self, num_tokens: int) -> None:
        """Count a sample that ended by itself."""
        self._finished.note(num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Count a sample that was stopped at this length and will not resume."""
        self._cut.note(num_tokens)

    def trained(self, num_tokens: int) -> None:
        """Count a finished sample that was trained."""
        self._trained.note(num_tokens)

    def filtered(self, num_tokens: int) -> None:
        """Count a finished sample whose group a user's filter dropped."""
        self._filtered.note(num_tokens)

    def dropped(self, num_tokens: int) -> None:
        """Count a finished sample whose group was stale or failed."""
        self._dropped.note(num_tokens)

    def close_step(self) -> None:
        """End a training step: all earlier samples lose a little weight."""
        for tally in (self._finished, self._cut, self._trained, self._filtered, self._dropped):
            tally.forget()
        self._grown = [grown * _FORGET for grown in self._grown]

    def stats(self, in_flight: Iterable[int]) -> LengthStats:
        """The present estimates, given the lengths that samples in flight have reached (100,000 take some 10 ms)."""
        self._look_at(in_flight)
        tallies = (self._finished, self._cut, self._trained, self._filtered, self._dropped)
        size = min(NUM_BUCKETS, 2 + max((*(tally.top for tally in tallies), *self._in_flight)))
        finished, cut, trained, filtered, dropped = (tally.counts[:size] for tally in tallies)
        finished_tokens, _, trained_tokens, filtered_tokens, dropped_tokens = (tally.tokens[:size] for tally in tallies)
        passed, passed_tokens = added(trained, filtered), added(trained_tokens, filtered_tokens)
        started = life_table(finished, cut, self._grown[:size])
        fair = let_through = life_table(passed)
        fair_summary = let_through_summary = summary(let_through, means(passed, passed_tokens))
        if self._cut.total or self._dropped.total:
            known, known_tokens = added(passed, dropped), added(passed_tokens, dropped_tokens)
            fair = life_table(known, cut)
            fair_summary = summary(fair, means(known, known_tokens))
        return LengthStats(
            finished=self._finished.total,
            cut=self._cut.total,
            trained=self._trained.total,
            filtered=self._filtered.total,
            dropped=self._dropped.total,
            started=summary(started, means(finished, finished_tokens)),
            let_through=let_through_summary,
            fair=fair_summary,
            bias=distance(let_through, fair) if any(let_through) else 0.0,
            chance=self._chance(),
        )

    def _look_at(self, in_flight: Iterable[int]) -> None:
        now = Counter([(length * length).bit_length() for length in in_flight])  # bucket_of, without the call
        for bucket in now.keys() | self._in_flight.keys():
            self._grown[bucket] += now[bucket] - self._in_flight[bucket]
        self._in_flight = now

    def _chance(self) -> float:
        """The critical distance.

        The distance is the share lost times the distance between the lost and the rest, which are independent samples.
        """
        passed = _effective(self._trained, self._filtered) / self._group_size
        lost = _effective(self._dropped, self._cut) / self._group_size
        if not passed or not lost:
            return 0.0
        weights = [sum(tally.counts) for tally in (self._trained, self._filtered, self._dropped, self._cut)]
        return _CRITICAL * sum(weights[2:]) / sum(weights) * math.sqrt(1 / passed + 1 / lost)


class _Tally:
    """Counts of samples by bucket, with more weight on recent ones."""

    __slots__ = ("counts", "squares", "tokens", "top", "total")

    def __init__(self) -> None:
        self.total = 0
        self.top = 0
        """The highest bucket that ever held a sample."""
        self.counts = [0.0] * NUM_BUCKETS
        self.tokens = [0.0] * NUM_BUCKETS
        self.squares = 0.0
        """Sum of the squared weights."""

    def note(self, num_tokens: int) -> None:
        bucket = bucket_of(num_tokens)
        if bucket > self.top:
            self.top = bucket
        self.total += 1
        self.counts[bucket] += 1.0
        self.tokens[bucket] += num_tokens
        self.squares += 1.0

    def forget(self) -> None:
        used = slice(self.top + 1)
        self.counts[used] = [count * _FORGET for count in self.counts[used]]
        self.tokens[used] = [tokens * _FORGET for tokens in self.tokens[used]]
        self.squares *= _FORGET * _FORGET


def _effective(*tallies: _Tally) -> float:
    """The number of samples of equal weight with the same variance (Kish 1965)."""
    squares = sum(tally.squares for tally in tallies)
    return sum(sum(tally.counts) for tally in tallies) ** 2 / squares if squares else 0.0
