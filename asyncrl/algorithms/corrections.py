"""Corrections for tokens sampled by another policy than the one whose ratio is clipped.

There are three policies.  The *behaviour* policy sampled the tokens: the rollout engine, maybe steps ago.  The
*proximal* policy is the trainer's at the start of the step.  The present policy is being trained.  All results are
constants.
Shape letters: T response tokens, sample after sample.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.losses import MAX_LOG_RATIO, held_log_ratio
from asyncrl.algorithms.samples import sample_means, sample_sums

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask", "whole"]


def importance_weights(
    proximal_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int],
    *,
    level: Level,
    mode: Mode,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Compute each token's weight in the policy loss, and whether its ratio was outside ``low`` to ``high``.

    ``w = pi_prox / pi_behave`` of the token, of the whole sample (``sequence``), or its geometric mean over the tokens
    of the sample (``geometric``).

    - ``truncate`` or ``clip``: clip(w, low, high), truncated importance sampling.
    - ``mask``: w where it is within the bounds, else 0: masked importance sampling, IcePop (arXiv 2510.18855).
    - ``whole``: w, as in the decoupled objective ``w * min(u A, clip(u) A)``, u = pi / pi_prox, of AReaL
      (arXiv 2505.24298).

    Where ``mask_T`` is false, log-probs may be any number, and no token counts as outside.
    """
    log_T = held_log_ratio(proximal_T.detach(), behaviour_T, mask_T)
    if level == "sequence":
        log_T = sample_sums(log_T, mask_T, lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif level == "geometric":
        log_T = sample_means(log_T, mask_T, lengths)
    weights_T = log_T.exp()
    is_outside_T = ((weights_T < low) | (weights_T > high)) & mask_T
    if mode in ("truncate", "clip"):
        weights_T = weights_T.clamp(low, high)
    elif mode == "mask":
        weights_T = torch.where(is_outside_T, 0.0, weights_T)
    return weights_T, is_outside_T


def off_policy_sequences(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int],
    *,
    delta: float,
) -> Tensor:
    """Return True at tokens to leave out: negative advantage, in a sample from which the policy has moved away.

    ``A < 0`` and ``mean over the sample of log(pi_behave / pi) > delta``: off-policy sequence masking, DeepSeek-V3.2
    (arXiv 2512.02556).
    """
    distance_T = sample_means(-held_log_ratio(logprobs_T.detach(), behaviour_T, mask_T), mask_T, lengths)
    return (advantages_T < 0) & (distance_T > delta) & mask_T
