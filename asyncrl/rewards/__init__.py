"""Built-in rewards, selected by ``--rm-type``."""

from collections.abc import Mapping

from asyncrl.protocols import RewardFn
from asyncrl.rewards.exact import same_text
from asyncrl.rewards.number import same_number

BUILT_IN: Mapping[str, RewardFn] = {"number": same_number, "exact": same_text}
"""Reward functions by the value of ``--rm-type``."""

__all__ = ["BUILT_IN", "same_number", "same_text"]
