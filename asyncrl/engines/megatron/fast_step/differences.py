"""Differences between the result of a fast operation and that of its plain form, and their limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_SHARE = 4
"""The limit of one row, divided by that of a whole tensor.  Rows differ more than their mean: with bfloat16 logits of
up to 5, the likeliest id of a token has a probability that is 1.6 % off."""
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Limits of whole tensors.  float32: sums of 100,000 numbers differ by 2e-6.  bfloat16 rounds by up to 2**-9, and an
operation rounds up to three times.  On an H200, attention differs by 1.9e-3 to 3.4e-3
(benchmarks/results/attention_h200_2026-11-24.md), and the log-prob head by 3.1e-3 to 3.7e-3
(benchmarks/results/trainer_h200_2026-11-24.md)."""

_NUMBERS_AT_A_TIME = 2**26
"""Numbers that are compared at a time, 256 MiB in float32.  An output matrix has ten times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of one output or gradient."""

    what: str
    value: float
    limit: float

    @property
    def share(self) -> float:
        """The difference divided by its limit; infinite if the result has NaN or infinite numbers."""
        return self.value / self.limit if math.isfinite(self.value) else math.inf

    def __str__(self) -> str:
        return f"difference {self.value:.2g} in {self.what}, limit {self.limit:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The comparison of one operation on one rank."""

    operation: str
    difference: Difference | None
    """The difference that is nearest to its limit, or furthest above it; None if the operation raised an exception."""
    error: str = ""
    """The exception."""
    advice: str = ""
    """The setting that avoids the operation."""

    @property
    def share(self) -> float:
        """The difference divided by its limit; infinite after an exception."""
        return math.inf if self.difference is None else self.difference.share

    @property
    def is_equal(self) -> bool:
        """Whether the operation equals its plain form."""
        return self.share <= 1

    def __str__(self) -> str:
        return f"{self.operation}: {self.difference or self.error}"


def limit_of(dtype: torch.dtype) -> float:
    """Return the limit for an operation on tensors of ``dtype``."""
    return _LIMITS[dtype]


def worst(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], limit: float) -> Difference:
    """Compare outputs and gradients by name; return the largest relative difference."""
    return largest([Difference(what=what, value=relative(found[what], exact[what]), limit=limit) for what in exact])


def largest(differences: Sequence[Difference]) -> Difference:
    """Return the difference that is nearest to its limit, or furthest above it."""
    return max(differences, key=lambda each: each.share)


@torch.no_grad()
def relative(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference divided by the norm of ``exact``, or a ``ROW_SHARE``th of one row's if larger.

    A row's difference is divided by the sum of its norm and the median norm of all rows.  A row that is small because
    large terms cancel has an error of the size of these terms.
    """
    if found.shape != exact.shape:
        return math.inf
    if not exact.numel():
        return 0.0
    width = exact.shape[-1] if exact.dim() > 1 else 1
    num_rows = max(1, _NUMBERS_AT_A_TIME // width)
    pieces = zip(*(torch.split(each.reshape(-1, width), num_rows) for each in (found, exact)), strict=True)
    norms = [((mine.to(other.dtype) - other).norm(dim=1), other.norm(dim=1)) for mine, other in pieces]
    apart_R, size_R = (torch.cat(each) for each in zip(*norms, strict=True))
    of_row = _divided(apart_R, size_R + size_R.median()).max()
    return float(torch.maximum(_divided(apart_R.norm(), size_R.norm()), of_row / ROW_SHARE))


@torch.no_grad()
def absolute(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference, or a ``ROW_SHARE``th of the largest one if that is more."""
    if found.shape != exact.shape:
        return math.inf
    if not exact.numel():
        return 0.0
    apart = (found.detach().to(exact.dtype) - exact).abs()
    return float(torch.maximum(apart.square().mean().sqrt(), apart.max() / ROW_SHARE))


def _divided(apart: Tensor, size: Tensor) -> Tensor:
    """Divide; 0 where both are 0."""
    return torch.where((apart == 0) & (size == 0), 0.0, apart / size)
