"""The reward for an answer that equals the label."""

from collections.abc import Mapping
from typing import Any

from asyncrl.rewards.graders.labels import accepted


def same_text(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if answer and label are equal apart from surrounding whitespace, else 0.0.

    Raises RewardFailed if the row has no label.
    """
    return float(response.strip() in (answer.strip() for answer in accepted(label)))
