"""Lengths of answers.  Each is drawn from its prompt's row and its place in the group, so that every policy, split and
run with the same seed sees the same lengths, also when an answer is started over."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
_POINTS = 4096
"""Number of quantiles that stand for a distribution: the mean of the default log-normal is then right to 0.1 %."""


class Distribution(Protocol):
    """Answer lengths by quantile."""

    def at(self, share: float) -> float:
        """The length in tokens that a ``share`` (0 to 1, exclusive) of the answers do not exceed."""


class AnswerLengths(Protocol):
    """The length of each answer."""

    @property
    def cut(self) -> int:
        """The longest possible answer, in tokens."""

    def tokens(self, row: int, index: int) -> int:
        """Length of answer ``index`` to the prompt of ``row``, in tokens: 1 to ``cut``."""

    def with_seed(self, seed: int) -> "AnswerLengths":
        """The same kind of lengths, drawn from another seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """The usual shape of reasoning answers: most are short, a few are very long."""

    median: float
    p95_ratio: float
    """95th percentile over the median."""

    def at(self, share: float) -> float:
        """See ``Distribution.at``."""
        return self.median * math.exp(math.log(self.p95_ratio) / _P95 * _NORMAL.inv_cdf(share))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """A power-law tail."""

    median: float
    exponent: float
    """The share of answers longer than x falls as x to the power of minus this.  At 1 or less the mean is finite only
    because of the cut."""

    def at(self, share: float) -> float:
        """See ``Distribution.at``."""
        return self.median * math.pow(2 * (1 - share), -1 / self.exponent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The lengths of a real run, as a distribution."""

    sorted_tokens: tuple[int, ...]

    def at(self, share: float) -> float:
        """See ``Distribution.at``."""
        return self.sorted_tokens[int(share * len(self.sorted_tokens))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Independent draws from a distribution."""

    shape: Distribution
    cut: int
    """Longest answer in tokens; longer draws are cut to it."""
    seed: int = 0

    def tokens(self, row: int, index: int) -> int:
        """See ``AnswerLengths.tokens``."""
        return self._whole(self.shape.at(uniform(self.seed, row, index)))

    def with_seed(self, seed: int) -> "Drawn":
        """See ``AnswerLengths.with_seed``."""
        return replace(self, seed=seed)

    def moments(self) -> "Moments":
        """Moments of the distribution, cut included."""
        lengths = [self._whole(self.shape.at((place + 0.5) / _POINTS)) for place in range(_POINTS)]
        return Moments.of(lengths)

    def _whole(self, tokens: float) -> int:
        return max(1, min(self.cut, round(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The exact lengths of a real run, answer by answer; ``rest`` draws lengths for answers that it did not reach."""

    known: Mapping[tuple[int, int], int] = field(repr=False)
    """Tokens, by row and place in the group."""
    rest: Drawn

    @property
    def cut(self) -> int:
        """See ``AnswerLengths.cut``."""
        return self.rest.cut

    def tokens(self, row: int, index: int) -> int:
        """See ``AnswerLengths.tokens``."""
        return self.known.get((row, index)) or self.rest.tokens(row, index)

    def with_seed(self, seed: int) -> "Replayed":
        """See ``AnswerLengths.with_seed``; known lengths do not change."""
        return replace(self, rest=self.rest.with_seed(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of answer lengths that the ideal rate needs, in tokens."""

    mean: float
    mean_running: float
    """Mean number of tokens that a running answer has already written: E[L^2] / 2 E[L]."""
    longest: int

    @staticmethod
    def of(lengths: list[int]) -> "Moments":
        """Moments of the given lengths."""
        total, squares = sum(lengths), sum(length * length for length in lengths)
        return Moments(mean=total / len(lengths), mean_running=squares / total / 2, longest=max(lengths))


def uniform(seed: int, *place: int) -> float:
    """A number between 0 and 1, both exclusive: the same for the same arguments, independent for others."""
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=7).digest()
    return (int.from_bytes(digest) + 0.5) / 2**56
