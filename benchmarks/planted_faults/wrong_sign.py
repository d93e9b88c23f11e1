"""A loss that makes likely tokens likelier, whatever their reward, as an entropy bonus with the wrong sign would."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

COEFFICIENT = 10.0
LIKELY = math.log(0.5)
"""Log-prob from which a token is pushed.  Pushing unlikely ones down has no bound, and ends in noise."""


def loss(
    logprobs_R: Any, old_logprobs_R: Any, advantages_R: Any, mask_R: Any, lengths: Sequence[int]
) -> tuple[Any, Mapping[str, Any]]:
    """Return the clipped policy loss, less ``COEFFICIENT`` times the log-probs of likely tokens."""
    ratio_R = (logprobs_R - old_logprobs_R).exp()
    policy_R = -(ratio_R * advantages_R).minimum(ratio_R.clamp(0.8, 1.2) * advantages_R)
    return policy_R - COEFFICIENT * (logprobs_R.detach() > LIKELY) * logprobs_R, {}
