"""The label of a prompt as text."""

import json

from asyncrl.errors import RewardFailed
from asyncrl.types import Prompt


def label_text(prompt: Prompt) -> str:
    """Return the label: text as it is, any other value as JSON.  Raises RewardFailed if the row has no label."""
    if prompt.label is None:
        raise RewardFailed(f"row {prompt.row} has no label")
    return prompt.label if isinstance(prompt.label, str) else json.dumps(prompt.label, ensure_ascii=False)
