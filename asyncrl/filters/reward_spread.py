"""Drops groups that teach nothing."""

from asyncrl.types import ScoredGroup

SMALLEST_SPREAD = 1e-6
"""slime's bound on the standard deviation, here on the range: rewards that differ in float noise count as equal."""


def check_reward_nonzero_std(group: ScoredGroup) -> str | None:
    """Keep a group whose rewards differ; equal rewards have no advantage.  The reason has the reward in it."""
    rewards = [scored.reward for scored in group.samples]
    if max(rewards) - min(rewards) > SMALLEST_SPREAD:
        return None
    return f"zero_std_{rewards[0]:.1f}"
