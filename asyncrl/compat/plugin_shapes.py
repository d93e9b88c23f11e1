"""The adapters for slime's rewards and filters."""

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.compat.slime_sample import Sample as SlimeSample
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.compat.slime_views import group_to_slime, nested, to_slime
from asyncrl.errors import name_of
from asyncrl.protocols import KeepFn
from asyncrl.types import Prompt, Sample, ScoredGroup


def reward_from_slime(function: Callable[..., Any], args: SlimeArgs) -> Callable[[Prompt, Sample], Any]:
    """Adapt ``rm(args, sample, **kwargs)`` to ``reward(prompt, sample)``; a coroutine function stays one."""

    def reward(prompt: Prompt, sample: Sample, /) -> Any:
        return function(args, _unscored(prompt, sample, args))

    return reward


def group_reward_from_slime(function: Callable[..., Any], args: SlimeArgs) -> Callable[[Prompt, Sequence[Sample]], Any]:
    """Adapt ``rm(args, samples, **kwargs)`` to ``reward(prompt, samples)``; a coroutine function stays one."""

    def reward(prompt: Prompt, samples: Sequence[Sample], /) -> Any:
        return function(args, [_unscored(prompt, sample, args) for sample in samples])

    return reward


def _unscored(prompt: Prompt, sample: Sample, args: SlimeArgs) -> SlimeSample:
    size = getattr(args, "n_samples_per_prompt", None)
    return to_slime(prompt, sample, None, sample.generated_mask, group_size=size)


def filter_from_slime(function: Callable[..., Any], args: SlimeArgs) -> KeepFn:
    """Adapt ``filter(args, samples, **kwargs)`` to a KeepFn.

    The function returns a bool or an object with ``keep`` and ``reason``.  The samples of an episode whose function
    returned a list are a list in ``samples``.
    """
    name = name_of(function)

    def keep(group: ScoredGroup, /) -> str | None:
        verdict = function(args, nested(group, group_to_slime(group)))
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
