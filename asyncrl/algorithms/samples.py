"""Sums and means within samples that are stored one after the other.

Shape letters: T response tokens, sample after sample; N samples.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def parts(values_T: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """Split values into one view per sample."""
    rows: Sequence[Tensor] = values_T.split(list(lengths))  # type: ignore[no-untyped-call]
    return rows


def from_host(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the numbers as a tensor on ``device``; the host does not wait for a GPU."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def sample_sums(values_T: Tensor, mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute at each token the sum over the trained tokens of its sample."""
    if not lengths:
        return values_T
    # Sum sample by sample: a scattered sum adds in no fixed order on a GPU.
    sums_N = torch.stack([part.sum() for part in parts(torch.where(mask_T, values_T, 0.0), lengths)])
    return sums_N.repeat_interleave(from_host(lengths, torch.long, values_T.device), output_size=len(values_T))


def sample_means(values_T: Tensor, mask_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute at each token the mean over the trained tokens of its sample; 0 in a sample without any."""
    counts_T = sample_sums(mask_T.to(values_T.dtype), mask_T, lengths)
    return sample_sums(values_T, mask_T, lengths) / counts_T.clamp(min=1.0)
