"""Generation and scoring of one answer, for training and evaluation alike."""

import hashlib
from collections.abc import Callable, Sequence

from asyncrl.episodes import Trajectory
from asyncrl.event_loop import loop_time
from asyncrl.metrics.timeline import Timeline
from asyncrl.outages import OUTAGE_S, CircuitBreaker
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.retry import RetryingEngine, UndeliveredTokens, ended
from asyncrl.pipeline.sampling.scoring import reward_set_inside, score, score_group, time_limit
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.protocols import GroupRewardFn, RewardFn, Tokenizer
from asyncrl.types import (
    Chunk,
    FinishReason,
    GroupId,
    Prompt,
    Request,
    Reward,
    Sample,
    SamplingParams,
    ScoredSample,
    Weights,
)

MOST_VERSIONS = 4096
"""Versions that a chunk may name: far more than the staleness bound leaves in flight."""


class ServingWeights:
    """The weights that the engines serve, and every version that a chunk can name."""

    def __init__(self, weights: Weights) -> None:
        self.now = weights
        self.by_version = {weights.version: weights}

    def expect(self, weights: Weights) -> None:
        """Announce ``weights`` before they are published; chunks may name their version from now on."""
        self.by_version[weights.version] = weights
        if len(self.by_version) > MOST_VERSIONS:
            del self.by_version[next(iter(self.by_version))]

    def set(self, weights: Weights) -> None:
        """Record that every engine samples from ``weights``."""
        self.expect(weights)
        self.now = weights


class Sampler:
    """Generates and scores single answers.  Each holds one slot while it is on an engine."""

    def __init__(
        self,
        *,
        engine: RetryingEngine,
        reward: RewardFn,
        reward_timeout_s: float,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        slots: Slots,
        serving: ServingWeights,
        timeline: Timeline,
        seed: int,
        episodes: EpisodeSettings | None = None,
        is_training: bool = False,
        replays_routes: bool = False,
        num_top: int = 0,
        reward_outage_s: float = OUTAGE_S,
    ) -> None:
        """With ``episodes``, a function generates the samples, otherwise each is a single turn.

        With ``is_training``, the engines are asked for all that the trainer needs besides tokens: with
        ``replays_routes`` the routes of experts, and ``num_top`` likeliest ids at each token.
        """
        self.sampling = sampling
        self.slots = slots
        self.serving = serving
        self.episodes = episodes
        self._engine = engine
        self._reward = reward
        self._reward_timeout_s = time_limit(reward, reward_timeout_s)
        self._group_reward = reward if isinstance(reward, GroupRewardFn) else None  # this check takes microseconds
        self._tokenizer = tokenizer
        self.outage = CircuitBreaker("the reward function", limit_s=reward_outage_s, holds_groups=is_training)
        """The record of successful calls of a reward function that needs a service."""
        self.timeline = timeline
        self._seed = seed
        self._is_training = is_training
        self._num_top = num_top
        self._wants_routes = is_training and replays_routes
        self.undelivered = UndeliveredTokens()
        """The functions that are told of tokens that wait for the end of their answer."""

    @property
    def retries(self) -> int:
        """Attempts after a failure, so far."""
        return self._engine.retries

    @property
    def aborts(self) -> int:
        """Attempts that an interruption ended, so far."""
        return self._engine.aborts

    def partial(self, index: int, group_id: GroupId | None = None, routes_from: int = 0) -> PartialSample:
        """Return an empty answer with position ``index`` in its group; an evaluation has no group.

        If routes are wanted at all, the first position that needs one is ``routes_from``.
        """
        return PartialSample(index, self.serving.by_version, group_id, routes_from if self._wants_routes else None)

    async def generate(
        self, name: str, seed: int | str, prompt: Prompt, partial: PartialSample, on_tokens: Callable[[int], object]
    ) -> Sample:
        """Wait for a slot and generate the rest of ``partial``.

        ``on_tokens`` is called with the number of tokens of each chunk.  Raises SampleFailed or EngineRejected.
        """

        def extend(chunk: Chunk) -> None:
            partial.extend(chunk)
            on_tokens(len(chunk.token_ids))

        request_id, call_seed = f"{name}.{partial.index}", sample_seed(self._seed, seed, partial.index)
        async with self.slots.hold() as slot:
            reason, seconds = await self.turn(
                slot, request_id, call_seed, prompt.token_ids, self.sampling, partial, extend
            )
        text = self._tokenizer.decode(partial.token_ids)
        return partial.finish(text, reason, seconds, len(prompt.token_ids))

    async def turn(
        self,
        slot: int,
        request_id: str,
        seed: int,
        before: tuple[int, ...],
        sampling: SamplingParams,
        partial: PartialSample,
        extend: Callable[[Chunk], None],
        routing_key: str | None = None,
    ) -> tuple[FinishReason, float]:
        """Generate the rest of ``partial`` behind ``before``, and return its finish reason and the seconds it took.

        The caller holds ``slot``, and adds the chunks to ``partial`` in ``extend``.
        """
        start, written = loop_time(), partial.token_ids
        request = Request(
            request_id=request_id,
            token_ids=before + written,
            sampling=sampling.after(len(written)) if written else sampling,
            seed=seed,
            weights=self.serving.now,
            routing_key=routing_key,
            returns_kept=self._is_training and sampling.is_limited,
            num_top=self._num_top,
            routes_from=partial.routes_from,
        )
        decode = self._tokenizer.decode if sampling.stop else None
        reason = partial.ended or (ended(written, sampling, decode) if written else None)  # it may be complete
        reason = reason or await self._engine.generate(request, extend, decode, written, self.undelivered)
        stop = loop_time()
        self.timeline.sample(
            slot,
            request_id,
            start,
            stop,
            tokens=partial.num_tokens,
            version=request.weights.version,
            finish=reason.value,
        )
        return reason, stop - start

    def seed_of(self, group_seed: int | str, index: int) -> int:
        """Return the random seed of one answer; see ``sample_seed``."""
        return sample_seed(self._seed, group_seed, index)

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of ``token_ids``."""
        return self._tokenizer.decode(token_ids)

    async def score(self, prompt: Prompt, sample: Sample) -> ScoredSample:
        """Return the answer with its reward and with every token in the loss.  Raises RewardFailed."""
        return _scored(sample, await self._reward_of(prompt, sample))

    async def score_trajectory(self, prompt: Prompt, trajectory: Trajectory) -> ScoredSample:
        """Return the sample of an episode with its reward, from the reward function if the episode set none.

        Raises RewardFailed.
        """
        reward = reward_set_inside(prompt, trajectory)
        if reward is None:
            reward = await self._reward_of(prompt, trajectory.sample)
        return _of_trajectory(trajectory, reward)

    @property
    def scores_groups(self) -> bool:
        """Whether the reward needs all samples of a group at once (``--group-rm``)."""
        return self._group_reward is not None

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> list[ScoredSample]:
        """Return ``score`` of every sample of a group, from one call of the reward.  Raises RewardFailed."""
        return list(map(_scored, samples, await self._rewards_of(prompt, samples)))

    async def score_trajectories(self, prompt: Prompt, made: Sequence[Trajectory]) -> list[ScoredSample]:
        """Return ``score_trajectory`` of every sample of a group, from one call of the reward.  Raises RewardFailed."""
        rewards = await self._rewards_of(prompt, [each.sample for each in made])
        return [
            _of_trajectory(each, reward_set_inside(prompt, each) or reward)
            for each, reward in zip(made, rewards, strict=True)
        ]

    async def _reward_of(self, prompt: Prompt, sample: Sample) -> Reward:
        return await self.outage.call(lambda: score(self._reward, prompt, sample, self._reward_timeout_s))

    async def _rewards_of(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        if (reward := self._group_reward) is None:
            raise TypeError("the reward scores samples one by one")
        return await self.outage.call(lambda: score_group(reward, prompt, samples, self._reward_timeout_s))


def _of_trajectory(made: Trajectory, reward: Reward) -> ScoredSample:
    return ScoredSample(sample=made.sample, reward=reward.value, loss_mask=made.loss_mask, reward_parts=reward.parts)


def _scored(sample: Sample, reward: Reward) -> ScoredSample:
    mask = (1,) * len(sample.token_ids)
    return ScoredSample(sample=sample, reward=reward.value, loss_mask=mask, reward_parts=reward.parts)


def sample_seed(run_seed: int, group_seed: int | str, index: int) -> int:
    """Return a seed below 2**31 for one answer: the same in every run, unrelated between answers.

    ``group_seed`` is a group id, or text that no group id is.
    """
    digest = hashlib.blake2b(f"{run_seed}:{group_seed}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) & 0x7FFFFFFF
