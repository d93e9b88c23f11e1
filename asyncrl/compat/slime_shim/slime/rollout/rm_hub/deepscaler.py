"""The reward of DeepScaleR: the boxed answer behind the thoughts."""

from typing import Any

from asyncrl.rewards.graders.math import after_thinking

__all__ = ["get_deepscaler_rule_based_reward"]


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 if the answer after ``</think>`` equals the label, else 0; 0 as well without a label."""
    return int(after_thinking(response, label, {})) if label not in ("", None) else 0
