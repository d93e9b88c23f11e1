"""Calls of user functions.  A reward or filter that raises, hangs or returns nonsense becomes a named error."""

import asyncio
import numbers
from collections.abc import Awaitable, Sequence
from typing import Any

from asyncrl.episodes import Trajectory
from asyncrl.errors import FilterFailed, RewardFailed, RewardKeyMissing, RewardUnavailable, label_of, place_of
from asyncrl.event_loop import Deadline, is_cancelled
from asyncrl.outages import reached_by
from asyncrl.protocols import GroupRewardFn, HasDeadlines, KeepFn, RewardFn
from asyncrl.types import Prompt, Reward, Sample, ScoredGroup, is_usable


def time_limit(reward: object, timeout_s: float) -> float | None:
    """Return the time limit for one call of ``reward``; None if it limits its waits itself."""
    return None if isinstance(reward, HasDeadlines) and reward.has_deadlines else timeout_s


async def score(reward: RewardFn, prompt: Prompt, sample: Sample, timeout_s: float | None) -> Reward:
    """Return the reward of one sample; ``timeout_s`` is a ``time_limit``.

    Raises RewardFailed if the function raises, takes longer than ``timeout_s``, or returns no number that is usable.
    """
    who = f"row {prompt.row}, sample {sample.index}{label_of(reward)}"
    return _checked(who, await _called(who, reward(prompt, sample), timeout_s))


async def score_group(
    reward: GroupRewardFn, prompt: Prompt, samples: Sequence[Sample], timeout_s: float | None
) -> list[Reward]:
    """Return the rewards of all samples of a group, in order.  Raises RewardFailed, also for a wrong count."""
    who, by = f"row {prompt.row}", label_of(reward)
    values = await _called(f"{who}{by}", reward.of_group(prompt, samples), timeout_s)
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RewardFailed(f"{who}{by}: a group reward must be a list of numbers, got {values!r}")
    if len(values) != len(samples):
        raise RewardFailed(f"{who}{by}: got {len(values)} rewards for a group of {len(samples)} samples")
    return [_checked(f"{who}, sample {sample.index}{by}", value) for sample, value in zip(samples, values, strict=True)]


async def _called(who: str, call: Awaitable[Any], timeout_s: float | None) -> Any:
    """Await a call of a user function.

    Raises RewardFailed for any exception: RewardUnavailable if it shows an outage, and after ``timeout_s``.
    """
    deadline = Deadline(timeout_s)
    try:
        async with deadline:
            return await call
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise RewardFailed(f"{who}: the reward function raised CancelledError") from error
    except Exception as error:  # any exception of a user function drops one group, not the run
        raise _named(
            who, error, timeout_s if isinstance(error, TimeoutError) and deadline.expired() else None
        ) from error


def _named(who: str, error: Exception, limit_s: float | None) -> RewardFailed:
    """Return the named error of a call that raised; ``limit_s``: the time limit that the call exceeded."""
    if limit_s is not None:
        return RewardUnavailable(f"{who}: no reward within {limit_s:g} s", True, True)
    if isinstance(error, RewardUnavailable):
        return RewardUnavailable(f"{who}: {error}", error.reached, error.is_late)
    if isinstance(error, RewardFailed):
        kind = RewardKeyMissing if isinstance(error, RewardKeyMissing) else RewardFailed
        return kind(f"{who}: {error}")
    text, reached = f"{who}: {type(error).__name__}: {error}", reached_by(error)
    return RewardFailed(f"{text}{place_of(error)}") if reached is None else RewardUnavailable(text, reached)


def _checked(who: str, value: Any) -> Reward:
    number, parts = (value.value, value.parts) if isinstance(value, Reward) else (value, {})
    if is_usable(number):
        return Reward(value=float(number), parts=parts)
    shown = "another" if isinstance(number, numbers.Rational) else f"{number!r:.80}"  # it may have 10,000 digits
    raise RewardFailed(f"{who}: a reward must be one number from -1e15 to 1e15, got {shown}")


def reward_set_inside(prompt: Prompt, made: Trajectory) -> Reward | None:
    """Return the reward that an episode set, or None.  Raises RewardFailed for a number that is not usable."""
    who = f"row {prompt.row}, sample {made.sample.index}"
    for turn in made.sample.turns:
        if turn.reward is not None:
            _checked(f"{who}, turn {turn.call}", turn.reward)
    return None if made.reward is None else _checked(who, made.reward)


def verdict(keep: KeepFn, group: ScoredGroup) -> str | None:
    """Return the filter's reason for dropping a group, or None to keep it.

    Raises FilterFailed if the filter raises or returns anything else.
    """
    who = f"row {group.prompt.row}{label_of(keep)}"
    try:
        reason = keep(group)
    except (Exception, asyncio.CancelledError) as error:  # a user function, as above; it never awaits
        raise FilterFailed(f"{who}: {type(error).__name__}: {error}{place_of(error)}") from error
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    raise FilterFailed(f"{who}: a filter must return None or a reason, got {reason!r}")
