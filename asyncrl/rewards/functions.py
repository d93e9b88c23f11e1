"""User functions as rewards: ``async def`` in the process of user code, plain ``def`` in the run's worker processes."""

from collections.abc import Sequence

from asyncrl.errors import RewardFailed
from asyncrl.rewards.built_in import BuiltIn
from asyncrl.rewards.resources import resources
from asyncrl.rewards.values import reward_of, rewards_of
from asyncrl.types import Prompt, Reward, Sample


class InUserProcess:
    """A reward ``async (prompt, sample)`` that the process of user code runs."""

    def __init__(self, program: str, label: str = "") -> None:
        """``program`` is its name among the programs of the process, ``label`` its flag and path for errors."""
        self.program = program
        self.user_label = label

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward.  Raises RewardFailed."""
        return _only(await resources().user_code().score(self.program, prompt, (sample,)))

    async def warm(self) -> None:
        """Wait until the process has loaded the function."""
        await resources().user_code().ready()


class InUserProcessGroup(InUserProcess):
    """A reward ``async (prompt, samples)`` of whole groups that the process of user code runs."""

    async def of_group(self, prompt: Prompt, samples: Sequence[Sample], /) -> list[Reward]:
        """Return one reward per sample.  Raises RewardFailed."""
        return await resources().user_code().score(self.program, prompt, tuple(samples))


class SetByEpisode:
    """The reward of a run whose episodes set their rewards; a row may name a built-in reward instead."""

    has_deadlines = True

    def __init__(self, of_row: BuiltIn) -> None:
        self._of_row = of_row

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward that the row names.  Raises RewardFailed."""
        if prompt.metadata.get("rm_type") is None:
            raise RewardFailed("the episode set no reward, and the run has neither rm-type nor custom-rm-path")
        return await self._of_row(prompt, sample)


class InPool:
    """A reward ``(prompt, sample)`` that a worker process computes."""

    has_deadlines = True
    needs_pool = True

    def __init__(self, resolver: bytes, key: str | None, label: str = "") -> None:
        """``resolver``: a pickled function without parameters that returns the reward function.

        ``label``: its flag and path, for errors.
        """
        self.user_label = label
        self._resolver = resolver
        self._key = key

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward.  Raises RewardFailed."""
        return reward_of(await resources().pool.run(self._resolver, prompt, sample.without_columns()), self._key)


class InPoolGroup(InPool):
    """A reward ``(prompt, samples)`` of whole groups that a worker process computes."""

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        """Return the reward of a group with one sample."""
        return _only(await self.of_group(prompt, (sample,)))

    async def of_group(self, prompt: Prompt, samples: Sequence[Sample], /) -> list[Reward]:
        """Return one reward per sample.  Raises RewardFailed."""
        plain = [each.without_columns() for each in samples]
        return rewards_of(await resources().pool.run(self._resolver, prompt, plain), self._key)


class Batched:
    """A reward ``compute_reward(prompts, responses)`` of a class."""

    has_deadlines = True

    def __init__(self, resolver: bytes, key: str | None, label: str = "") -> None:
        """``resolver``: a pickled function without parameters that makes the object and returns its method.

        ``label``: its flag and path, for errors.
        """
        self.user_label = label
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
