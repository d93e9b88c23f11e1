"""The reward of a multiple-choice answer."""

from typing import Any

from asyncrl.rewards.graders.gpqa import option

__all__ = ["compute_gpqa_reward"]


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """Return 1.0 if the answer names the right option, else 0.0."""
    return 0.0 if response is None else option(response, "" if label is None else label, metadata or {})
