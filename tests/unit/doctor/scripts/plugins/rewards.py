"""A reward in slime's shape."""

from slime.utils.types import Sample


async def rm(args, sample: Sample, **kwargs) -> float:
    return float(sample.response == sample.label)
