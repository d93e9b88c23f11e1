"""How long answers are.  Each is drawn from its prompt's row and its place in the group, so that every policy, split
and run with the same seed sees the same lengths, also when an answer is started over."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
_POINTS = 4096
"""Quantiles that stand for a distribution: the mean of the default log-normal is then right to 0.1 %."""


class Distribution(Protocol):
    """AnswerLengths by quantile."""

    def at(self, share: float) -> float:
        """The length in tokens that ``share`` (0 to 1, exclusive) of the answers do not exceed."""


class AnswerLengths(Protocol):
    """The length of each answer."""

    @property
    def cut(self) -> int:
        """No answer is longer, in tokens."""

    def tokens(self, row: int, index: int) -> int:
        """Of answer ``index`` to the prompt of ``row``: 1 to ``cut``."""

    def with_seed(self, seed: int) -> "AnswerLengths":
        """Others of the same kind."""


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
    """The share of answers longer than x falls as x to the power of minus this; at most 1 has no mean but for the
    cut."""

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
    """Longer answers are cut here, in tokens."""
    seed: int = 0

    def tokens(self, row: int, index: int) -> int:
        """See ``AnswerLengths.tokens``."""
        return self._whole(self.shape.at(uniform(self.seed, row, index)))

    def with_seed(self, seed: int) -> "Drawn":
        """See ``AnswerLengths.with_seed``."""
        return replace(self, seed=seed)

    def moments(self) -> "Moments":
        """Of the distribution, cut included."""
        lengths = [self._whole(self.shape.at((place + 0.5) / _POINTS)) for place in range(_POINTS)]
        return Moments.of(lengths)

    def _whole(self, tokens: float) -> int:
        return max(1, min(self.cut, round(tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The very lengths of a real run, answer by answer; ``rest`` is for answers that it did not get to."""

    known: Mapping[tuple[int, int], int] = field(repr=False)
    """By row and place in the group, in tokens."""
    rest: Drawn

    @property
    def cut(self) -> int:
        """See ``AnswerLengths.cut``."""
        return self.rest.cut

    def tokens(self, row: int, index: int) -> int:
        """See ``AnswerLengths.tokens``."""
        return self.known.get((row, index)) or self.rest.tokens(row, index)

    def with_seed(self, seed: int) -> "Replayed":
        """See ``AnswerLengths.with_seed``: what is known stays."""
        return replace(self, rest=self.rest.with_seed(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What the ideal needs to know about lengths, in tokens."""

    mean: float
    mean_running: float
    """Mean number of tokens that a running answer has already written: E[L^2] / 2 E[L]."""
    longest: int

    @staticmethod
    def of(lengths: list[int]) -> "Moments":
        """Of given lengths."""
        total, squares = sum(lengths), sum(length * length for length in lengths)
        return Moments(mean=total / len(lengths), mean_running=squares / total / 2, longest=max(lengths))


def uniform(seed: int, *place: int) -> float:
    """A number between 0 and 1, both exclusive: the same for the same arguments, unrelated for others."""
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=7).digest()
    return (int.from_bytes(digest) + 0.5) / 2**56
