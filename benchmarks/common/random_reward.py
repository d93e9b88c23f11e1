"""Random rewards, drawn from the answer's text: half of all answers count as right."""

import zlib

from asyncrl.types import Prompt, Sample


async def reward(prompt: Prompt, sample: Sample) -> float:
    """0 or 1, by a checksum of the text: the same for the same answer."""
    return float(zlib.crc32(sample.text.encode()) % 2)
