"""Calling user functions: rewards and filters may raise anything and take any time; what comes out has a name."""

import asyncio
import math
import numbers

from asyncrl.errors import FilterFailed, RewardFailed
from asyncrl.event_loop import is_cancelled
from asyncrl.protocols import KeepFn, RewardFn
from asyncrl.types import Prompt, Sample, ScoredGroup


async def score(reward: RewardFn, prompt: Prompt, sample: Sample, timeout_s: float) -> float:
    """The reward of one sample.  Raises RewardFailed when the function raises, is slow or gives no finite number."""
    who = f"row {prompt.row}, sample {sample.index}"
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            value = await reward(prompt, sample)
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise RewardFailed(f"{who}: the reward was cancelled from inside") from error
    except Exception as error:  # a user's function: whatever it raises costs one group, not the run
        late = isinstance(error, TimeoutError) and deadline.expired()
        why = f"no reward within {timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
        raise RewardFailed(f"{who}: {why}") from error
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise RewardFailed(f"{who}: a reward must be one finite number, got {value!r}")


def verdict(keep: KeepFn, group: ScoredGroup) -> str | None:
    """The filter's reason for dropping a group, None to keep it.  Raises FilterFailed if it does neither."""
    try:
        reason = keep(group)
    except (Exception, asyncio.CancelledError) as error:  # a user's function, as above; it never waits
        raise FilterFailed(f"row {group.prompt.row}: {type(error).__name__}: {error}") from error
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise FilterFailed(f"row {group.prompt.row}: a filter must return None or a reason, got {reason!r}")
