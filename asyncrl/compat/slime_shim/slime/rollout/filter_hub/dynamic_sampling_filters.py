"""The filters of groups whose rewards are all equal."""

import statistics
from collections.abc import Sequence
from typing import Any

from asyncrl.compat.slime_types import DynamicFilterOutput

__all__ = ["check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"]


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ.  Samples of one episode that come as a list count one by one."""
    flat = [each for item in samples for each in (item if isinstance(item, list) else [item])]
    rewards = [float(sample.get_reward_value(args)) for sample in flat]
    keep = len(rewards) > 1 and statistics.stdev(rewards) > 1e-6
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Any], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ, and others rather than sample anew."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
