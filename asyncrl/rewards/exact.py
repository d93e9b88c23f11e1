"""The reward for an answer that equals the label."""

from asyncrl.errors import RewardFailed
from asyncrl.types import Prompt, Sample


async def same_text(prompt: Prompt, sample: Sample) -> float:
    """Return 1.0 if answer and label are equal apart from surrounding whitespace, else 0.0.

    Raises RewardFailed if the row has no label.
    """
    if prompt.label is None:
        raise RewardFailed(f"row {prompt.row} has no label")
    return float(sample.text.strip() == prompt.label.strip())
