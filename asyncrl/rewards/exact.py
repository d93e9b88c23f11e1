"""The reward for an answer that equals the label."""

from asyncrl.rewards.labels import label_text
from asyncrl.types import Prompt, Sample


async def same_text(prompt: Prompt, sample: Sample) -> float:
    """Return 1.0 if answer and label are equal apart from surrounding whitespace, else 0.0.

    Raises RewardFailed if the row has no label.
    """
    return float(sample.text.strip() == label_text(prompt).strip())
