"""The open episodes of one owner: the scheduler, or one pass of an evaluation."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, EpisodeStart
from asyncrl.errors import EpisodeEnded
from asyncrl.event_loop import loop_time
from asyncrl.metrics.facts import EpisodeStats
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.open_episode import OpenEpisode
from asyncrl.pipeline.sampling.sampler import Sampler
from asyncrl.task_groups import TaskGroup
from asyncrl.types import GroupId, Prompt


class Episodes:
    """Opens episodes, and runs their functions in a task group: ``async with``.  Its end cancels the open ones."""

    def __init__(self, load: EpisodeLoad, timeline: Timeline, on_move: Callable[[], None] = lambda: None) -> None:
        """``on_move`` is called when a function asks an engine."""
        self._load = load
        self._timeline = timeline
        self._tasks = TaskGroup()
        self._open: set[OpenEpisode] = set()
        self._on_move = on_move
        self._ends: Counter[EpisodeEnd] = Counter()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._tool_s = 0.0
        self._engine_s = 0.0

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for episode in tuple(self._open):
            episode.close()
        await self._tasks.__aexit__(kind, error, trace)

    def open(
        self,
        sampler: Sampler,
        prompt: Prompt,
        *,
        name: str,
        group_seed: int | str,
        index: int,
        group_size: int,
        group_id: GroupId | None = None,
        data_set: str | None = None,
        hold: Callable[[], AbstractAsyncContextManager[int]] | None = None,
    ) -> OpenEpisode:
        """Return a new episode, which ``OpenEpisode.resume`` starts; its name is ``name`` and ``index``."""
        if sampler.episodes is None:
            raise AssertionError("the sampler has no episodes")
        start = EpisodeStart(
            name=f"{sampler.episodes.key}{name}.{index}",
            prompt=prompt,
            sampling=sampler.sampling,
            index=index,
            group_size=group_size,
            seed=sampler.seed_of(group_seed, index),
            group_id=group_id,
            data_set=data_set,
        )
        episode = OpenEpisode(start, sampler, self, self._load, hold or sampler.slots.hold)
        self._open.add(episode)
        self._timeline.counter("episodes open", loop_time(), self._load.num_open)
        return episode

    def start(self, episode: OpenEpisode) -> "asyncio.Task[None]":
        """See ``EpisodeOwner``."""
        return self._tasks.create_task(episode.run(), name=f"episode-{episode.start.name}")

    def moved(self, episode: OpenEpisode) -> None:
        """See ``EpisodeOwner``."""
        self._on_move()

    def ended(self, episode: OpenEpisode) -> None:
        """See ``EpisodeOwner``."""
        self._open.discard(episode)
        self._timeline.counter("episodes open", loop_time(), self._load.num_open)
        result = episode.result
        if isinstance(result, EpisodeOutcome):
            self._ends[result.end] += 1
            for name, value in result.metrics.items():
                self._sums[name] += value
            self._tool_s += result.tool_s
        else:
            self._ends[EpisodeEnd.CANCELLED if isinstance(result, EpisodeEnded) else EpisodeEnd.FAILED] += 1
        self._engine_s += episode.engine_s

    @property
    def num_open(self) -> int:
        """Number of open episodes."""
        return len(self._open)

    def take_stats(self) -> EpisodeStats:
        """Return the counts so far, and the sums since the last call."""
        stats = EpisodeStats(
            ended={end.value: self._ends[end] for end in EpisodeEnd},
            tool_s=self._tool_s,
            engine_s=self._engine_s,
            sums=dict(self._sums),
        )
        self._tool_s = self._engine_s = 0.0
        self._sums.clear()
        return stats
