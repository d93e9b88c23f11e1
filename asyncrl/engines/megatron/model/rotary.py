"""Rotary position embeddings (RoFormer, arXiv 2104.09864) of packed tokens.

Megatron's implementation handles a packed microbatch sequence by sequence, in every layer.
Shape letters: T tokens, A attention heads, D head dimension (of angles: its rotated part), F frequencies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.models.rope import Llama3Rope, Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryAngles:
    """Cosines and sines of each token's rotary angles, the same in every layer."""

    cos_T1D: Tensor
    sin_T1D: Tensor
    is_interleaved: bool
    """True: each component is rotated with its neighbour.  False: with the one half the rotated part away."""


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Compute the rotary frequencies: float32 radians per position, fastest first, one per two rotated components."""
    size = int(head_dim * rope.fraction)
    frequencies_F = 1.0 / rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return _stretched(frequencies_F, rope.scaling) if isinstance(rope.scaling, Llama3Rope) else frequencies_F


def rotary_angles(positions_T: Tensor, frequencies_F: Tensor, dtype: torch.dtype, *, interleaved: bool) -> RotaryAngles:
    """Compute the rotary angles of tokens at ``positions_T``, in the ``dtype`` of queries and keys."""
    angles_TF = positions_T.float().unsqueeze(-1) * frequencies_F
    angles_TD = angles_TF.repeat_interleave(2, -1) if interleaved else torch.cat([angles_TF, angles_TF], -1)
    angles_T1D = angles_TD.unsqueeze(1)
    return RotaryAngles(
        cos_T1D=angles_T1D.cos().to(dtype), sin_T1D=angles_T1D.sin().to(dtype), is_interleaved=interleaved
    )


def rotated(numbers_TAD: Tensor, rotary: RotaryAngles) -> Tensor:
    """Rotate queries or keys: of each head the first components, as many as there are angles."""
    size = rotary.cos_T1D.shape[-1]
    first, rest = numbers_TAD[..., :size], numbers_TAD[..., size:]
    result = first * rotary.cos_T1D + _rotate_half(first, rotary.is_interleaved) * rotary.sin_T1D
    return torch.cat([result, rest], -1) if rest.shape[-1] else result


def _rotate_half(numbers: Tensor, is_interleaved: bool) -> Tensor:
    if is_interleaved:
        return torch.stack([-numbers[..., 1::2], numbers[..., ::2]], -1).flatten(-2)
    first, second = numbers.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _stretched(frequencies_F: Tensor, scaling: Llama3Rope) -> Tensor:
    """Apply Llama 3.1's rule for contexts longer than those of the pretraining: see ``Llama3Rope``."""
    wavelengths_F = 2 * math.pi / frequencies_F
    low, high = scaling.low_frequency, scaling.high_frequency
    share_F = ((scaling.original_positions / wavelengths_F - low) / (high - low)).clamp(0, 1)
    return frequencies_F * (share_F + (1 - share_F) / scaling.factor)
