"""A loss whose entropy bonus has the wrong sign: it makes likely tokens likelier, whatever their reward."""

from collections.abc import Mapping, Sequence
from typing import Any

COEFFICIENT = 5.0


def loss(
    logprobs_R: Any, old_logprobs_R: Any, advantages_R: Any, mask_R: Any, lengths: Sequence[int]
) -> tuple[Any, Mapping[str, Any]]:
    """Return the clipped policy loss, plus ``COEFFICIENT`` times an estimate with the gradient of the entropy.

    The gradient of the entropy is the mean of -log p times the gradient of log p, with any baseline.
    """
    ratio_R = (logprobs_R - old_logprobs_R).exp()
    policy_R = -(ratio_R * advantages_R).minimum(ratio_R.clamp(0.8, 1.2) * advantages_R)
    told_R = logprobs_R.detach()
    baseline = told_R[mask_R.bool()].mean() if mask_R.any() else 0.0
    return policy_R - COEFFICIENT * (told_R - baseline) * logprobs_R, {}
