"""Calling user functions: rewards and filters may raise anything and take any time; what comes out has a name."""

import asyncio
import math

from asyncrl.errors import FilterFailed, RewardFailed
from asyncrl.protocols import KeepFn, RewardFn
from asyncrl.types import Prompt, Sample, ScoredGroup


async def score(reward: RewardFn, prompt: Prompt, sample: Sample, timeout_s: float) -> float:
    """The reward of one sample.  Raises RewardFailed when the function raises, is slow or gives no finite number."""
    try:
        async with asyncio.timeout(timeout_s):
            value = await reward(prompt, sample)
    except TimeoutError as error:
        raise RewardFailed(f"row {prompt.row}, sample {sample.index}: no reward within {timeout_s:g} s") from error
    except Exception as error:  # a user's function: whatever it raises costs one group, not the run
        raise RewardFailed(f"row {prompt.row}, sample {sample.index}: {type(error).__name__}: {error}") from error
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    raise RewardFailed(f"row {prompt.row}, sample {sample.index}: a reward must be one finite number, got {value!r}")


def verdict(keep: KeepFn, group: ScoredGroup) -> str | None:
    """The filter's reason for dropping a group, None to keep it.  Raises FilterFailed when the function raises."""
    try:
        return keep(group)
    except Exception as error:  # a user's function, as above
        raise FilterFailed(f"row {group.prompt.row}: {type(error).__name__}: {error}") from error
