"""Which groups to keep."""

from asyncrl.filters.reward_spread import check_reward_nonzero_std

__all__ = ["check_reward_nonzero_std"]
