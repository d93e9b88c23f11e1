"""Two samples of answers' lengths: whether they come from one distribution, by a permutation test.

The answers of a group share their prompt, so groups are permuted and not answers.  All groups weigh the same, however
many lives trained them.  The statistic is that of Kolmogorov and Smirnov: the largest distance between the two shares
of answers up to a length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_PERMUTATIONS = 2000
type Lengths = Sequence[Sequence[int]]
"""The lengths of the answers of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of the test."""

    num_answers: tuple[int, int]
    means: tuple[float, float]
    distance: float
    """The statistic of the test, 0 to 1."""
    p: float
    """Chance of such a distance, or a larger one, if both samples come from one distribution."""


def compared(started: Lengths, trained: Lengths, seed: int = 0) -> Comparison | None:
    """Compare two samples of groups; None if one is empty."""
    if not any(map(len, started)) or not any(map(len, trained)):
        return None
    started, trained = [each for each in started if each], [each for each in trained if each]
    shares = _shares([*started, *trained])
    is_trained = np.arange(len(shares)) >= len(started)
    found = _distance(shares, is_trained[None])[0]
    draw = np.random.default_rng(seed)
    by_chance = np.concatenate(
        [_distance(shares, draw.permuted(np.tile(is_trained, (50, 1)), axis=1)) for _ in range(NUM_PERMUTATIONS // 50)]
    )
    as_far = int((by_chance >= found - 1e-12).sum())
    return Comparison(
        num_answers=(sum(map(len, started)), sum(map(len, trained))),
        means=(_mean(started), _mean(trained)),
        distance=float(found),
        p=(1 + as_far) / (1 + len(by_chance)),
    )


def _shares(groups: Lengths) -> NDArray[np.float64]:
    """Return the share of each group's answers, one row each, that have each length."""
    shares = np.zeros((len(groups), max(map(max, groups)) + 1))
    for row, group in zip(shares, groups, strict=True):
        np.add.at(row, list(group), 1 / len(group))
    return shares


def _distance(shares: NDArray[np.float64], is_trained: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the distance for each row of ``is_trained``, which divides the groups into two samples."""
    found = []
    for mask in (is_trained, ~is_trained):
        cumulated = np.cumsum(mask.astype(float) @ shares, axis=1)
        found.append(cumulated / np.maximum(cumulated[:, -1:], 1.0))
    distance: NDArray[np.float64] = np.abs(found[0] - found[1]).max(axis=1)
    return distance


def _mean(groups: Lengths) -> float:
    return float(np.mean([np.mean(group) for group in groups]))
