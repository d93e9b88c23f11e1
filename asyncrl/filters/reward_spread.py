"""The filter that drops groups without any difference in reward."""

from asyncrl.types import ScoredGroup

SMALLEST_SPREAD = 1e-6
"""Smallest range of rewards that counts as a difference; smaller ones are float rounding.

slime applies the same bound to the standard deviation.
"""


def check_reward_nonzero_std(group: ScoredGroup) -> str | None:
    """Keep a group whose rewards differ, because equal rewards have no advantage.  The reason contains the reward."""
    rewards = [scored.reward for scored in group.samples]
    if max(rewards) - min(rewards) > SMALLEST_SPREAD:
        return None
    return f"zero_std_{rewards[0]:.1f}"
