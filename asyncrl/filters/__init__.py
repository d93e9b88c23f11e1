"""Built-in filters and buffer filters."""

from asyncrl.filters.bounds import LengthBounds, RewardBounds, TruncatedShare
from asyncrl.filters.combined import all_of
from asyncrl.filters.freshness import Fresh
from asyncrl.filters.reward_spread import check_reward_nonzero_std

__all__ = ["Fresh", "LengthBounds", "RewardBounds", "TruncatedShare", "all_of", "check_reward_nonzero_std"]
