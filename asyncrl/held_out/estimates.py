"""Means over held-out prompts with 95 % confidence intervals, and pass@k.

Answers to one prompt are not independent, so intervals are clustered by prompt: Miller, "Adding Error Bars to Evals"
(2024), arXiv:2411.00640, section 2.2, with the factor G / (G - 1) for G prompts.  They are normal approximations, and
too narrow for few prompts or for means close to 0 or 1.
"""

import math
from collections.abc import Sequence

from asyncrl.types import Estimate

Z = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""


def clustered_mean(groups: Sequence[Sequence[float]]) -> Estimate | None:
    """Return the mean of all values, with one group of values per prompt; None without any value."""
    filled = [group for group in groups if group]
    if not filled:
        return None
    total, size = sum(map(len, filled)), len(filled)
    mean = math.fsum(value for group in filled for value in group) / total
    if size < 2:
        return Estimate(mean)
    spread = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in filled)
    return Estimate(mean, Z * math.sqrt(spread * size / (size - 1)) / total)


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k answers is right.

    Equation 1 of Chen et al., "Evaluating Large Language Models Trained on Code" (2021), arXiv:2107.03374.
    Raises ValueError unless 1 <= k <= num_answers.
    """
    if not 1 <= k <= num_answers:
        raise ValueError(f"k must be 1 to {num_answers}, got {k}")
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to ``limit``."""
    return [1 << power for power in range(limit.bit_length())]


def mean_pass_at_k(rights: Sequence[Sequence[bool]], k: int) -> Estimate | None:
    """Return the mean of pass@k over the prompts that have at least k answers; None if there are none."""
    return clustered_mean([[pass_at_k(len(right), sum(right), k)] for right in rights if len(right) >= k])
