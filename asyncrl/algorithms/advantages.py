"""Advantages: the worth of an answer, or of each of its tokens, compared with what was expected.

A *step* is a response token that the loss mask lets through.  Tokens outside the mask are no steps: the steps before
and after them are adjacent.  ``lengths`` has each sample's number of steps, which may be 0.
Shape letters: N samples, T their steps, sample after sample, G groups.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

STD_FLOOR = 1e-6
"""Addend of a group's standard deviation, as in slime; below any difference between rewards that matters."""
VARIANCE_FLOOR = 1e-8
"""Addend of a batch's variance before the square root, as in the whitening of OpenRLHF and slime."""

Total = Callable[[Tensor], Tensor]
"""The sum of a tensor over all data-parallel ranks, which have different samples; for one rank, the tensor itself."""


def group_normalised(rewards_N: Tensor, groups_N: Tensor, rollouts_N: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from its rewards, and divide by the group's standard deviation.

    ``A_i = (r_i - mean(r)) / std(r)``: GRPO with outcome supervision, DeepSeekMath (arXiv 2402.03300), section 4.1.2;
    GSPO (arXiv 2507.18071, equation 6) and CISPO (MiniMax-M1, arXiv 2506.13585) use the same.  The standard deviation
    is that of a sample (n - 1).  A group of one or of equal rewards gets 0.  Samples with equal entries in ``groups_N``
    are one group, at whatever positions.

    Samples of a group with equal entries in ``rollouts_N`` are one rollout; None: each sample is a rollout.  Every
    rollout of a group weighs the same: with w = 1 / (samples of the rollout) and n rollouts, the mean is
    ``sum(w r) / n`` and the variance ``sum(w (r - mean)^2) / (n - 1)``.  Splitting a rollout into samples with its
    reward therefore changes no advantage.
    """
    centred_N = group_centred(rewards_N, groups_N, rollouts_N)
    place_N, weights_N, size_G = _weighed(rewards_N, groups_N, rollouts_N)
    squares_G = centred_N.new_zeros(len(size_G)).index_add(0, place_N, weights_N * centred_N.square())
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    advantages_N: Tensor = centred_N / (std_G + STD_FLOOR)[place_N]
    return advantages_N


def group_centred(rewards_N: Tensor, groups_N: Tensor, rollouts_N: Tensor | None = None) -> Tensor:
    """Subtract the mean of each group from its rewards, without a division: Dr. GRPO (arXiv 2503.20783).

    Rollouts weigh the same, as in ``group_normalised``.  Equal rewards of any size get exactly 0, although their mean
    is rounded: a division by the standard deviation would enlarge the rest.
    """
    place_N, weights_N, size_G = _weighed(rewards_N, groups_N, rollouts_N)
    sums_G = rewards_N.new_zeros(len(size_G)).index_add(0, place_N, weights_N * rewards_N)
    largest_G = rewards_N.new_zeros(len(size_G)).scatter_reduce(0, place_N, rewards_N, "amax", include_self=False)
    smallest_G = rewards_N.new_zeros(len(size_G)).scatter_reduce(0, place_N, rewards_N, "amin", include_self=False)
    mean_G = torch.where(largest_G == smallest_G, largest_G, sums_G / size_G)
    advantages_N: Tensor = rewards_N - mean_G[place_N]
    return advantages_N


def every_step(values_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """Repeat each sample's value at each of its steps."""
    return values_N.repeat_interleave(torch.tensor(lengths, dtype=torch.long, device=values_N.device))


def step_rewards(
    rewards_N: Tensor, kl_T: Tensor, lengths: Sequence[int], *, kl_coef: float, turns_T: Tensor | None = None
) -> Tensor:
    """Compute step rewards: a sample's reward at its last step, less ``kl_coef`` times each step's KL estimate.

    ``r_t = 1[t = T] r(x, y) - beta KL_t``: InstructGPT (arXiv 2203.02155) and REINFORCE++ (arXiv 2501.03262).  The
    reward of a sample without steps is lost.  ``turns_T`` are further rewards of steps: those of turns, at the last
    step of each, as in MT-PPO (arXiv 2505.11821).
    """
    rewards_T = -kl_coef * kl_T
    if turns_T is not None:
        rewards_T = rewards_T + turns_T
    sizes = torch.tensor(lengths, dtype=torch.long, device=rewards_N.device)
    has_steps = sizes > 0
    rewards_T[sizes.cumsum(0)[has_steps] - 1] += rewards_N[has_steps]
    return rewards_T


def reinforce_plus_plus(
    rewards_N: Tensor,
    kl_T: Tensor,
    lengths: Sequence[int],
    *,
    kl_coef: float,
    gamma: float,
    turns_T: Tensor | None = None,
) -> Tensor:
    """Compute discounted returns of ``step_rewards``, before the whitening over the batch.

    ``A_t = sum over s >= t of gamma^(s - t) r_s``: REINFORCE++ (arXiv 2501.03262), whose gamma is 1.
    """
    rewards_T = step_rewards(rewards_N, kl_T, lengths, kl_coef=kl_coef, turns_T=turns_T)
    return _from_behind(rewards_T, lengths, gamma)


def reinforce_plus_plus_baseline(centred_N: Tensor, kl_T: Tensor, lengths: Sequence[int], *, kl_coef: float) -> Tensor:
    """Subtract the KL term from centred rewards (``group_centred``), before the whitening over the batch.

    ``A_t = r - mean of the group's r - beta KL_t``: REINFORCE++-baseline (arXiv 2501.03262); the KL term within the
    advantage is slime's.
    """
    return every_step(centred_N, lengths) - kl_coef * kl_T


def gae(
    rewards_T: Tensor, values_T: Tensor, lengths: Sequence[int], *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates, and the returns that are the critic's regression targets.

    ``delta_t = r_t + gamma V_(t+1) - V_t``, with a value of 0 after the last step;
    ``A_t = delta_t + gamma lambda A_(t+1)`` (arXiv 1506.02438); ``R_t = A_t + V_t``.
    """
    next_T = torch.cat([values_T[1:], values_T.new_zeros(min(1, len(values_T)))])
    ends = torch.tensor(lengths, dtype=torch.long, device=values_T.device).cumsum(0)
    next_T[ends[ends > 0] - 1] = 0.0
    advantages_T = _from_behind(rewards_T + gamma * next_T - values_T, lengths, gamma * lambd)
    return advantages_T, advantages_T + values_T


def whitened(values_T: Tensor, total: Total) -> Tensor:
    """Subtract the mean from values and divide by the standard deviation, both over all steps on all ranks.

    ``(A - mean(A)) / std(A)`` over the batch: REINFORCE++ (arXiv 2501.03262).  Every rank must call it, even without
    steps.  The standard deviation is that of a sample (n - 1).
    """
    wide_T = values_T.double()
    count, added = total(torch.stack([wide_T.new_tensor(float(len(wide_T))), wide_T.sum()]))
    centred_T = wide_T - added / count.clamp(min=1.0)
    squares = total(centred_T.square().sum())
    deviation = (squares / (count - 1).clamp(min=1.0) + VARIANCE_FLOOR).sqrt()
    whitened_T: Tensor = (centred_T / deviation).to(values_T.dtype)
    return whitened_T


def _weighed(rewards_N: Tensor, groups_N: Tensor, rollouts_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each sample's place among the groups, its weight within its rollout, and each group's rollouts."""
    _, place_N, size_G = torch.unique(groups_N, return_inverse=True, return_counts=True)
    if rollouts_N is None:
        return place_N, torch.ones_like(rewards_N), size_G
    pairs_N2 = torch.stack([place_N, rollouts_N], dim=1)
    pairs_R2, rollout_N, samples_R = torch.unique(pairs_N2, dim=0, return_inverse=True, return_counts=True)
    weights_N = 1.0 / samples_R[rollout_N].to(rewards_N.dtype)
    return place_N, weights_N, torch.bincount(pairs_R2[:, 0], minlength=len(size_G))


def _from_behind(values_T: Tensor, lengths: Sequence[int], factor: float) -> Tensor:
    """Compute ``s_t = v_t + factor s_(t+1)`` within each sample, in one pass over time for all samples."""
    if not len(values_T):
        return values_T
    rows: Sequence[Tensor] = values_T.split(list(lengths))  # type: ignore[no-untyped-call]
    sums_LN = pad_sequence(list(rows))  # L: steps of the longest sample
    for place in reversed(range(len(sums_LN) - 1)):
        sums_LN[place] += factor * sums_LN[place + 1]
    return torch.cat([sums[:length] for sums, length in zip(sums_LN.T, lengths, strict=True)])
