"""Rewards of nobody's work: half of the answers are right, whatever they say."""

import zlib

from asyncrl.types import Prompt, Sample


async def reward(prompt: Prompt, sample: Sample) -> float:
    """0 or 1, by the text: the same for the same answer."""
    return float(zlib.crc32(sample.text.encode()) % 2)
