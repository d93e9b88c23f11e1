"""User functions as rewards: ``async def`` on the event loop, plain ``def`` in the run's worker processes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asyncrl.errors import RewardFailed
from asyncrl.rewards.resources import resources
from asyncrl.rewards.values import reward_of, rewards_of
from asyncrl.types import Prompt, Reward, Sample


class OnLoop:
    """A reward ``async (prompt, sample)``."""

    def __init__(self, function: Callable[[Prompt, Sample], Awaitable[Any]], key: str | None) -> None:
        self.function = function
        self._key = key

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward.  Raises RewardFailed, or what the function raises."""
        return reward_of(await self.function(prompt, sample), self._key)


class OnLoopGroup:
    """A reward ``async (prompt, samples)`` of whole groups."""

    def __init__(self, function: Callable[[Prompt, Sequence[Sample]], Awaitable[Any]], key: str | None) -> None:
        self.function = function
        self._key = key

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward of a group with one sample."""
        return _only(await self.of_group(prompt, (sample,)))

    async def of_group(self, prompt: Prompt, samples: Sequence[Sample], /) -> list[Reward]:
        """Return one reward per sample.  Raises RewardFailed, or what the function raises."""
        return rewards_of(await self.function(prompt, samples), self._key)


class InPool:
    """A reward ``(prompt, sample)`` that a worker process computes."""

    has_deadlines = True
    needs_pool = True

    def __init__(self, resolver: bytes, key: str | None) -> None:
        """``resolver``: a pickled function without parameters that returns the reward function."""
        self._resolver = resolver
        self._key = key

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward.  Raises RewardFailed."""
        return reward_of(await resources().pool.run(self._resolver, prompt, sample), self._key)


class InPoolGroup(InPool):
    """A reward ``(prompt, samples)`` of whole groups that a worker process computes."""

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward of a group with one sample."""
        return _only(await self.of_group(prompt, (sample,)))

    async def of_group(self, prompt: Prompt, samples: Sequence[Sample], /) -> list[Reward]:
        """Return one reward per sample.  Raises RewardFailed."""
        return rewards_of(await resources().pool.run(self._resolver, prompt, list(samples)), self._key)


class Batched:
    """A reward ``compute_reward(prompts, responses)`` of a class."""

    has_deadlines = True

    def __init__(self, resolver: bytes, key: str | None) -> None:
        """``resolver``: a pickled function without parameters that makes the object and returns its method."""
        self._resolver = resolver
        self._key = key

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward.  Raises RewardFailed."""
        return reward_of(await resources().model(self._resolver).score(prompt.text, sample.text), self._key)

    async def warm(self) -> None:
        """Make the object.  Raises RewardFailed."""
        await resources().model(self._resolver).load()


def _only(rewards: list[Reward]) -> Reward:
    if len(rewards) != 1:
        raise RewardFailed(f"got {len(rewards)} rewards for a group of 1 sample")
    return rewards[0]
