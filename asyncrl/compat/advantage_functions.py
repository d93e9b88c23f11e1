"""The adapter for slime's advantage functions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.errors import name_of

if TYPE_CHECKING:  # imports torch, which a run without such a function does not need
    from asyncrl.algorithms.custom_functions import AdvantageFn, StepSamples


def advantage_from_slime(function: Callable[..., Any], args: SlimeArgs) -> "AdvantageFn":
    """Adapt ``fn(args, rollout_data)``, which sets ``rollout_data["advantages"]``, to an AdvantageFn.

    The function receives the whole training step; in slime it receives one rank's share.  ``returns`` are ignored,
    because only a critic would use them.
    """
    name = name_of(function)

    def advantage(samples: "StepSamples", /) -> Any:
        rollout_data = _rollout_data(samples)
        there = ", ".join(rollout_data)
        try:
            function(args, rollout_data)
        except KeyError as error:
            if error.args and error.args[0] not in rollout_data:
                raise KeyError(f"{error.args[0]!r} is not in rollout_data, which has: {there}") from error
            raise
        if "advantages" not in rollout_data:
            raise ValueError(f"{name} must set rollout_data['advantages']")
        return rollout_data["advantages"]

    return advantage


def _rollout_data(samples: "StepSamples") -> dict[str, Any]:
    """The samples under slime's names, with slime's float32."""
    proximal = [row.float() for row in samples.proximal_logprobs]
    found = {
        "tokens": list(samples.token_ids),
        "total_lengths": [len(ids) for ids in samples.token_ids],
        "response_lengths": [len(mask) for mask in samples.masks],
        "loss_masks": [mask.int() for mask in samples.masks],
        "rewards": samples.outcomes_N.tolist(),
        "raw_reward": samples.rewards_N.tolist(),
        "rollout_log_probs": [row.float() for row in samples.behaviour_logprobs],
        "log_probs": proximal,
        "kl": [row.float() for row in samples.kl] if samples.kl else [0.0 * row for row in proximal],
        "group_ids": samples.groups_N.tolist(),
    }
    if samples.ref_logprobs is not None:
        found["ref_log_probs"] = [row.float() for row in samples.ref_logprobs]
    return found
