"""The mismatch between engines and trainer: their log-probs of the same tokens, by age and by position.

The engine's log-prob q of a token is the one that it was sampled with.  The trainer's log-prob p is that of its weights
before the step.  At age 0 both have the same weights, and differ by rounding and by other experts.  At a greater age
the weights differ, too.
"""

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.token_columns import POSITIONS
from asyncrl.types import Batch, ScoredSample, TrainReport

Floats = NDArray[np.float64]
_BINS = 1_200
_SMALLEST = 1e-8
_BIN_WIDTH = 0.02
"""Bins of absolute differences, each 2 % wider than the one before: from 1e-8 to 265 nats."""


class Mismatch:
    """The numbers of one step over its trained tokens with a known log-prob of the engine.

    It adds answer by answer, so that its user can give way between them.  A token takes about 60 ns.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._whole = _Tally()
        self._ages: dict[int, _Tally] = {}
        self._positions: dict[int, _Tally] = {}

    def add(self, scored: ScoredSample, trained_logprobs: Sequence[float]) -> None:
        """Add the trained tokens of one answer; ``trained_logprobs`` has one value per response token."""
        sample = scored.sample
        told = np.asarray(trained_logprobs, np.float64)
        log_ratio = told - np.frombuffer(sample.logprobs, np.float32)
        is_kept = np.frombuffer(bytes(scored.loss_mask), np.bool_) & np.isfinite(log_ratio)
        if not is_kept.any():
            return
        self._whole.add(log_ratio[is_kept])
        for span in sample.spans:
            kept = log_ratio[span.start : span.stop][is_kept[span.start : span.stop]]
            self._ages.setdefault(self._step - span.weights.step, _Tally()).add(kept)
        for start, stop in zip(POSITIONS, (*POSITIONS[1:], len(told)), strict=True):
            if start < len(told):
                self._positions.setdefault(start, _Tally()).add(log_ratio[start:stop][is_kept[start:stop]])

    def numbers(self) -> dict[str, float]:
        """Return the numbers by name; empty without tokens."""
        parts = {"mismatch": self._whole}
        parts |= {f"mismatch/age/{age}": tally for age, tally in sorted(self._ages.items())}
        parts |= {f"mismatch/position/{start}": tally for start, tally in sorted(self._positions.items())}
        return {
            f"{part}/{name}": value
            for part, tally in parts.items()
            if tally.num_tokens
            for name, value in tally.numbers().items()
        }


async def mismatch_of(batch: Batch, report: TrainReport) -> dict[str, float]:
    """Return the numbers of a step by name, as far as the report has log-probs."""
    mismatch = Mismatch(batch.step)
    for scored, told in answers(batch, report):
        mismatch.add(scored, told)
        await asyncio.sleep(0)  # 2 ms for an answer of 32,000 tokens
    return mismatch.numbers()


def answers(batch: Batch, report: TrainReport) -> Iterator[tuple[ScoredSample, Sequence[float]]]:
    """Yield the answers of a batch with the trainer's log-probs of their tokens, as far as the report has them."""
    scored = [each for group in batch.groups for each in group.samples]
    if len(scored) == len(report.logprobs):
        for each, told in zip(scored, report.logprobs, strict=True):
            if len(told) == len(each.loss_mask):
                yield each, told


class _Tally:
    """Sums over absolute log-ratios, and their histogram."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sum = self._k3 = self._largest = 0.0
        self._counts = np.zeros(_BINS, np.int64)

    def add(self, log_ratio: Floats) -> None:
        """Add tokens by their log p - log q."""
        if not len(log_ratio):
            return
        apart = np.abs(log_ratio)
        self.num_tokens += len(apart)
        self._sum += float(apart.sum())
        self._k3 += float((np.expm1(log_ratio) - log_ratio).sum())
        self._largest = max(self._largest, float(apart.max()))
        bins = np.log(np.maximum(apart, _SMALLEST) / _SMALLEST) / np.log1p(_BIN_WIDTH)
        self._counts += np.bincount(np.minimum(bins.astype(np.int64), _BINS - 1), minlength=_BINS)

    def numbers(self) -> dict[str, float]:
        """Return mean, 99th percentile (2 % too large at most) and maximum of the absolute log-ratio, and k3.

        k3 is the mean of r - 1 - log r with r = p / q, an unbiased estimate of the KL of q from p that is never
        negative (J. Schulman, Approximating KL Divergence, 2020).
        """
        place = int(np.searchsorted(np.cumsum(self._counts), 0.99 * self.num_tokens))
        return {
            "logprob_mean": self._sum / self.num_tokens,
            "logprob_p99": min(_SMALLEST * (1 + _BIN_WIDTH) ** (place + 1), self._largest),
            "logprob_max": self._largest,
            "k3": self._k3 / self.num_tokens,
        }
