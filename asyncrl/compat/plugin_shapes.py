"""The adapters for slime's rewards and filters."""

from collections.abc import Awaitable, Callable
from numbers import Real
from typing import Any

from asyncrl.compat.slime_types import SlimeArgs, group_to_slime, to_slime
from asyncrl.errors import RewardFailed, name_of
from asyncrl.protocols import KeepFn, RewardFn
from asyncrl.types import Prompt, Sample, ScoredGroup


def reward_from_slime(function: Callable[..., Awaitable[Any]], args: SlimeArgs) -> RewardFn:
    """Adapt ``async rm(args, sample, **kwargs) -> float`` to a RewardFn."""
    size = getattr(args, "n_samples_per_prompt", None)

    async def reward(prompt: Prompt, sample: Sample, /) -> float:
        value = await function(args, to_slime(prompt, sample, None, (1,) * len(sample.token_ids), group_size=size))
        if isinstance(value, Real):
            return float(value)
        raise RewardFailed(f"a reward must be one number, got a {type(value).__name__}: {value!r}")

    return reward


def filter_from_slime(function: Callable[..., Any], args: SlimeArgs) -> KeepFn:
    """Adapt ``filter(args, samples, **kwargs)`` to a KeepFn.

    The function returns a bool or an object with ``keep`` and ``reason``.
    """
    name = name_of(function)

    def keep(group: ScoredGroup, /) -> str | None:
        verdict = function(args, group_to_slime(group))
        kept = _as_bool(verdict)
        if kept is None:
            kept = getattr(verdict, "keep", None)
        if kept is None:
            raise TypeError(f"{name} must return a bool or an object with keep and reason, got {verdict!r}")
        return None if kept else str(getattr(verdict, "reason", None) or name)

    return keep


def _as_bool(verdict: Any) -> bool | None:
    """Convert a bool, a numpy bool or a one-element tensor to a bool; None for anything else."""
    plain = verdict.item() if hasattr(verdict, "item") else verdict
    return plain if isinstance(plain, bool) else None
