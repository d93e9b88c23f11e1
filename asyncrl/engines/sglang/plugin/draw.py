"""Sampling of tokens with per-request seeds in plain torch; upstream's needs Triton.  See ``cpu_platform``."""

import torch


def draw_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample one column index for each row of ``logprobs`` (n, m); ``seed`` and ``positions`` are (n,).

    A row's sample depends only on its log-probs, seed and position, not on the other rows.  Inverse transform sampling
    with a uniform number hashed from (seed, position): n hashes, where upstream's Gumbel noise needs n * m.
    """
    cumulative = logprobs.double().exp().cumsum(dim=1)
    threshold = _uniform(seed.long(), positions.long()).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logprobs.shape[1] - 1)


def _uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return numbers uniform on [0, 1) with 53 bits, by splitmix64's finalizer on int64 that wraps around."""
    bits = _mixed(_mixed(seed) + position)
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = bits - 7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return bits ^ ((bits >> 31) & (2**33 - 1))
