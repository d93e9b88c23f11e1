"""Distributions over length buckets, from samples of which some did not end.  Pure arithmetic.

A distribution is a list of shares by bucket that sum to 1, or of zeros if nothing is known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

NUM_BUCKETS = 66
"""Buckets for lengths below 2**32 tokens, plus one for lengths above everything seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Mean and quantiles of one distribution of answer lengths, in tokens."""

    mean: float
    p50: float
    p95: float
    """The 95th percentile.  Quantiles are interpolated within a bucket, whose edges are a factor 1.4 apart."""


def bucket_of(num_tokens: int) -> int:
    """The bucket of a length.  Bucket b holds lengths whose square has b bits; its lower edge is sqrt(2**(b - 1))."""
    return (num_tokens * num_tokens).bit_length()


def added(*counts: Sequence[float]) -> list[float]:
    """The sums of the counts, bucket by bucket."""
    return list(map(sum, zip(*counts, strict=True)))


def life_table(ended: Sequence[float], cut: Sequence[float] = (), grown: Sequence[float] = ()) -> list[float]:
    """The distribution of lengths, given where samples ended and where they were cut.

    ``grown`` is the number of samples in flight in a bucket, minus that number when counting began.  A sample that
    enters a bucket ends there, is cut there, is still there, or grows beyond it.  Samples cut in a bucket or still in
    it were observed for half of it on average and count half.  Samples that never ended are assigned to the bucket
    above everything seen.  Without ended samples nothing is known and all shares are 0.
    """
    if not any(ended):
        return [0.0] * len(ended)
    cut, grown = cut or [0.0] * len(ended), grown or [0.0] * len(ended)
    entered = added(ended, cut, grown)
    went_on = list(accumulate(reversed(entered), initial=0.0))[-2::-1]
    alive, shares = 1.0, [0.0] * len(ended)
    top = max(bucket for bucket, count in enumerate(entered) if count > 0)
    for bucket in range(min(top + 1, len(ended) - 1)):
        unsure = (cut[bucket] + max(0.0, grown[bucket])) / 2
        seen = ended[bucket] + max(0.0, went_on[bucket]) + unsure
        if seen > 0:
            shares[bucket] = alive * (ended[bucket] / seen)
            alive -= shares[bucket]
    shares[min(top + 1, len(ended) - 1)] += alive
    return shares


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest distance of the cumulative distributions (Kolmogorov-Smirnov), at bucket edges: 0 to 1."""
    return max(abs(mine - its) for mine, its in zip(accumulate(one), accumulate(other), strict=True))


def means(counts: Sequence[float], tokens: Sequence[float]) -> list[float]:
    """The mean length of each bucket: the mean of its samples if it has any, else its geometric middle."""
    return [
        total / count if count > 0 else middle for middle, count, total in zip(_MIDDLES, counts, tokens, strict=False)
    ]


def summary(shares: Sequence[float], bucket_means: Sequence[float]) -> LengthSummary | None:
    """Mean and quantiles of a distribution; None if nothing is known."""
    if not any(shares):
        return None
    return LengthSummary(
        mean=math.sumprod(shares, bucket_means),
        p50=_quantile(shares, bucket_means, 0.5),
        p95=_quantile(shares, bucket_means, 0.95),
    )


_EDGES = (0.0, *(math.sqrt(2 ** (bucket - 1)) for bucket in range(1, NUM_BUCKETS + 1)))
_MIDDLES = tuple(math.sqrt(low * high) for low, high in pairwise(_EDGES))


def _quantile(shares: Sequence[float], bucket_means: Sequence[float], level: float) -> float:
    below = 0.0
    for bucket, (share, mean) in enumerate(zip(shares, bucket_means, strict=True)):
        if share and below + share >= level:
            low = _EDGES[bucket]
            high = min(_EDGES[bucket + 1], 2 * mean - low)  # even around the bucket's mean: many may end at one limit
            return low + (high - low) * (level - below) / share
        below += share
    return _EDGES[NUM_BUCKETS]
