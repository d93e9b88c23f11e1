"""Calls of user functions.  A reward or filter that raises, hangs or returns nonsense becomes a named error."""

import asyncio
import math
import numbers

from asyncrl.errors import FilterFailed, RewardFailed
from asyncrl.event_loop import is_cancelled
from asyncrl.protocols import KeepFn, RewardFn
from asyncrl.types import Prompt, Sample, ScoredGroup


async def score(reward: RewardFn, prompt: Prompt, sample: Sample, timeout_s: float) -> float:
    """Return the reward of one sample.

    Raises RewardFailed if the function raises, takes longer than ``timeout_s``, or returns no finite number.
    """
    who = f"row {prompt.row}, sample {sample.index}"
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            value = await reward(prompt, sample)
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise RewardFailed(f"{who}: the reward function raised CancelledError") from error
    except Exception as error:  # any exception of a user function drops one group, not the run
        late = isinstance(error, TimeoutError) and deadline.expired()
        why = f"no reward within {timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
        raise RewardFailed(f"{who}: {why}") from error
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise RewardFailed(f"{who}: a reward must be one finite number, got {value!r}")


def verdict(keep: KeepFn, group: ScoredGroup) -> str | None:
    """Return the filter's reason for dropping a group, or None to keep it.

    Raises FilterFailed if the filter raises or returns anything else.
    """
    try:
        reason = keep(group)
    except (Exception, asyncio.CancelledError) as error:  # a user function, as above; it never awaits
        raise FilterFailed(f"row {group.prompt.row}: {type(error).__name__}: {error}") from error
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise FilterFailed(f"row {group.prompt.row}: a filter must return None or a reason, got {reason!r}")
