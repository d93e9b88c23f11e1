"""Rewards an answer that is the label."""

from asyncrl.errors import RewardFailed
from asyncrl.types import Prompt, Sample


async def same_text(prompt: Prompt, sample: Sample) -> float:
    """1.0 if answer and label are the same text, blanks around them aside, else 0.0."""
    if prompt.label is None:
        raise RewardFailed(f"row {prompt.row} has no label")
    return float(sample.text.strip() == prompt.label.strip())
