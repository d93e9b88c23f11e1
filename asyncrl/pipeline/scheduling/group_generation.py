"""The generation of groups: of a single turn per sample, or by episodes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from asyncrl.buffer import Dispatch
from asyncrl.errors import EngineRejected, EpisodeEnded, EpisodeFailed, FilterFailed, RewardFailed, SampleFailed
from asyncrl.metrics.facts import EpisodeStats
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.episodes import Episodes
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.sampler import Sampler
from asyncrl.pipeline.scheduling.episode_groups import EpisodeGroup, complete_episodes
from asyncrl.pipeline.scheduling.groups_in_flight import GroupInFlight, complete
from asyncrl.types import Prompt, Sample, ScoredGroup, Weights

GROUP_FAILURES = (SampleFailed, EngineRejected, EpisodeFailed, EpisodeEnded, RewardFailed, FilterFailed)
"""Errors that drop one group and count against the failure budget.  Any other error ends the run."""


class GroupGeneration:
    """Makes groups in flight and completes them, with the function of the sampler if it has one."""

    def __init__(
        self,
        sampler: Sampler,
        timeline: Timeline,
        *,
        group_size: int,
        mask_resumed: bool,
        on_move: Callable[[], None],
    ) -> None:
        """``on_move`` is called when the function of an episode asks an engine."""
        self._sampler = sampler
        self._group_size = group_size
        self._mask_resumed = mask_resumed
        load = sampler.slots.load
        if sampler.episodes is not None and load is None:
            raise ValueError("episodes need slots with a load")
        self._episodes = Episodes(load, timeline, on_move) if sampler.episodes is not None and load else None

    def running(self) -> AbstractAsyncContextManager[object]:
        """Return the context in which groups are generated; its end cancels the open episodes."""
        return self._episodes or nullcontext()

    @property
    def num_open(self) -> int | None:
        """Number of open episodes; None without episodes."""
        return None if self._episodes is None else self._episodes.num_open

    @property
    def has_room(self) -> bool:
        """Whether the limit on open episodes lets a new group start.

        A first one may always start: otherwise the episodes of an evaluation, which may be half of the limit, could
        keep it waiting for the whole pass.
        """
        return not self.num_open or self._sampler.slots.has_room(self._group_size)

    def take_stats(self) -> EpisodeStats | None:
        """Return the counts of episodes, with sums since the last call; None without episodes."""
        return self._episodes.take_stats() if self._episodes else None

    def begin(self, dispatch: Dispatch, prompt: Prompt, weights: Weights, since: float) -> GroupInFlight:
        """Return a new group, which ``complete`` generates."""
        group_id, size = dispatch.group_id, self._group_size
        if self._episodes is None:
            partials = [self._sampler.partial(index, group_id) for index in range(size)]
            return GroupInFlight(dispatch=dispatch, prompt=prompt, dispatched=weights, partials=partials, since=since)
        episodes = [
            self._episodes.open(
                self._sampler,
                prompt,
                name=f"g{group_id}",
                group_seed=group_id,
                index=index,
                group_size=size,
                group_id=group_id,
            )
            for index in range(size)
        ]
        return EpisodeGroup(
            dispatch=dispatch, prompt=prompt, dispatched=weights, partials=[], since=since, episodes=episodes
        )

    async def complete(
        self,
        group: GroupInFlight,
        on_tokens: Callable[[PartialSample | None, int], bool],
        on_samples: Callable[[Sequence[Sample]], None],
    ) -> ScoredGroup:
        """Generate and score what the group lacks.

        ``on_tokens`` is called with the sample that a chunk extended, or None in an episode, and the number of its
        tokens.  ``on_samples`` is called with the samples of each place that has ended.  Raises the error of a failed
        sample, a bug before a named error.
        """
        if isinstance(group, EpisodeGroup):
            return await complete_episodes(
                group,
                self._sampler,
                on_tokens=lambda num_tokens: on_tokens(None, num_tokens),
                on_end=on_samples,
                mask_resumed=self._mask_resumed,
            )
        return await complete(
            group,
            self._sampler,
            on_tokens=on_tokens,
            on_sample=lambda sample: on_samples((sample,)),
            mask_resumed=self._mask_resumed,
        )
