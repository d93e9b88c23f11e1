"""What an answer is worth compared with the other answers to its prompt.

Shape letters: N samples.
"""

import torch
from torch import Tensor

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, as slime does; below any difference between rewards that means something."""


def group_normalised(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Rewards minus the mean of their group, over its standard deviation.

    ``A_i = (r_i - mean(r)) / std(r)``: GRPO with outcome supervision, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    The deviation is the sample's (n - 1).  A group of one or of equal rewards gets 0.  Samples with equal entries in
    ``groups_N`` are one group, wherever they stand.
    """
    centred_N = group_centred(rewards_N, groups_N)
    _, place_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    squares_G = centred_N.new_zeros(len(size_G)).index_add(0, place_N, centred_N.square())
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    advantages_N: Tensor = centred_N / (std_G + STD_FLOOR)[place_N]
    return advantages_N


def group_centred(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Rewards minus the mean of their group, undivided: Dr. GRPO (arXiv 2503.20783)."""
    _, place_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    sums_G = rewards_N.new_zeros(len(size_G)).index_add(0, place_N, rewards_N)
    advantages_N: Tensor = rewards_N - (sums_G / size_G)[place_N]
    return advantages_N
