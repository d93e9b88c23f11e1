"""Whether long answers reach the trainer as often as short ones.  Arithmetic on histograms, without a clock.

Started lengths are estimated by a life table (Kaplan and Meier, "Nonparametric estimation from incomplete
observations", JASA 53, 1958; in its actuarial form, by buckets): a sample that ended by itself is an event, one that
was cut, or is still in flight, is censored at the length it has.  A mean over finished samples would miss the long.

The alarm is about what was lost.  Slots and buffer are bounded, so a sample that is merely held is trained or lost in
the end, and only losses can bias what is trained for long.  So what was let through (trained or filtered) is compared
with all samples whose fate is known: those, the dropped and the cut ones.  If nothing was lost the two are the same.
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
"""A sample counts half after so many steps: long enough for a thousand groups at 32 per step, short enough to follow
lengths that drift over some hundred steps of training."""

ALPHA = 1e-4
"""How often chance alone may exceed the critical value: a run looks some 1,000 times."""

MARGIN = 1.2
"""On the critical value, which is asymptotic and for known lengths, while those of cut samples are estimated.  In 520
random histories without bias, looked at 60 times each, the distance reached 0.87 of the critical value
(``tests/unit/metrics/length_histories.py``, seeds 0 to 39, losses of 2, 10 and 50 %)."""

MIN_EFFECT = 0.05
"""A choice: smaller differences, of the distributions or of the mean lengths, raise no alarm, however certain."""

_FORGET = 0.5 ** (1 / HALF_LIFE_STEPS)
_CRITICAL = MARGIN * math.sqrt(-math.log(ALPHA / 2) / 2)
"""Kolmogorov-Smirnov, two samples, asymptotic; to be multiplied by sqrt(1/n + 1/m)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Who was started, and who was let through.  Counts are of samples over the whole run, the rest is of late."""

    finished: int
    """Ended by themselves, whatever became of them."""
    cut: int
    """Stopped before their end: dropped, cancelled or failed."""
    trained: int
    filtered: int
    dropped: int
    """Ended by themselves, then dropped as stale or failed."""
    started: LengthSummary | None
    """Estimated with those in flight; None before anything finished."""
    let_through: LengthSummary | None
    """Trained or filtered; None before anything was."""
    fair: LengthSummary | None
    """What ``let_through`` would be, had nothing been lost."""
    bias: float
    """Largest distance of the cumulative distributions of ``let_through`` and ``fair``, 0 to 1."""
    chance: float
    """What ``bias`` may be although losses do not depend on length."""

    @property
    def mean_ratio(self) -> float:
        """Mean length of what was let through, over the mean length had nothing been lost; 1 where there is no bias."""
        return self.let_through.mean / self.fair.mean if self.let_through and self.fair and self.fair.mean else 1.0

    @property
    def alarm(self) -> str | None:
        """One line when what is let through differs from what was started by more than chance and enough to matter."""
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
    """Counts samples by length and by what became of them.  Each call below costs less than a microsecond."""

    def __init__(self, group_size: int) -> None:
        """``group_size`` is the number of samples per group, which are lost together: chance counts groups."""
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self._group_size = group_size
        self._finished, self._cut, self._trained, self._filtered, self._dropped = (_Tally() for _ in range(5))
        self._grown = [0.0] * NUM_BUCKETS
        """Of late: how many more are in flight with a length in this bucket."""
        self._in_flight: Counter[int] = Counter()
        """By bucket, when last looked at."""

    def finished(self, num_tokens: int) -> None:
        """A sample ended by itself."""
        self._finished.note(num_tokens)

    def cut(self, num_tokens: int) -> None:
        """A sample was stopped at this length and will not go on."""
        self._cut.note(num_tokens)

    def trained(self, num_tokens: int) -> None:
        """A finished sample was trained."""
        self._trained.note(num_tokens)

    def filtered(self, num_tokens: int) -> None:
        """A finished sample left with a group that a user's filter dropped."""
        self._filtered.note(num_tokens)

    def dropped(self, num_tokens: int) -> None:
        """A finished sample left with a group that was stale or failed."""
        self._dropped.note(num_tokens)

    def close_step(self) -> None:
        """A training step ended: everything before it counts a little less."""
        for tally in (self._finished, self._cut, self._trained, self._filtered, self._dropped):
            tally.forget()
        self._grown = [grown * _FORGET for grown in self._grown]

    def stats(self, in_flight: Iterable[int]) -> LengthStats:
        """What is known now, given the lengths that samples in flight have reached: 100,000 of them in some 10 ms."""
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
        now = Counter([(length * length).bit_length() for length in in_flight])  # bucket_of, without its call
        for bucket in now.keys() | self._in_flight.keys():
            self._grown[bucket] += now[bucket] - self._in_flight[bucket]
        self._in_flight = now

    def _chance(self) -> float:
        """The distance is the share lost times the distance between the lost and the rest: two independent samples."""
        passed = _effective(self._trained, self._filtered) / self._group_size
        lost = _effective(self._dropped, self._cut) / self._group_size
        if not passed or not lost:
            return 0.0
        weights = [sum(tally.counts) for tally in (self._trained, self._filtered, self._dropped, self._cut)]
        return _CRITICAL * sum(weights[2:]) / sum(weights) * math.sqrt(1 / passed + 1 / lost)


class _Tally:
    """Samples by bucket, the recent ones counting more."""

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
    """How many samples of equal weight would be as certain (Kish 1965)."""
    squares = sum(tally.squares for tally in tallies)
    return sum(sum(tally.counts) for tally in tallies) ** 2 / squares if squares else 0.0
