"""Under random events in any order no token is too old, nothing is lost or counted twice, and the run ends.

Random histories on a virtual clock, with the real scheduler, buffer, sampler and run.
"""

import asyncio
import logging
from collections import Counter
from itertools import batched
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.errors import EngineLost, EngineTimeout, FailureBudgetSpent, FilterBudgetSpent, plainly
from asyncrl.event_loop import loop_time
from asyncrl.metrics.facts import SchedulerStats
from asyncrl.types import Batch, Picked, Prompt, Request, Sample, ScoredGroup
from tests.unit.pipeline.harness import World, drawn, named
from tests.virtual_time import run_virtually

HISTORIES = 2_000
"""Histories in one run of the test: the least that the project promises."""
TOGETHER = 20
"""Histories in one example: hypothesis takes half a millisecond for each, a seventh of what a history takes."""


class Story:
    """A world in which a request's seed decides its sample's fate, and which records what happened."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.filtered: list[tuple[int, int]] = []
        self.failed_rewards = self.outage_failures = 0
        self.has_ended = False
        self.squeezes: int = plan.pop("squeezes")
        self.rejoins: int = plan.pop("rejoins")
        share_failing, share_rejected = plan.pop("failing"), plan.pop("rejected")
        self.cancel_at: float | None = plan.pop("cancel_at")
        tail: int = plan.pop("tail")
        short: int = plan.pop("short")
        picky = plan.pop("picky")
        away_from, away_s = plan.pop("away")
        share_spoiled: int = plan.pop("spoiled")
        self.num_spoiled = 0

        def lengths(request: Request) -> int:
            written = len(request.token_ids) - 3
            whole = short * tail if request.seed % 11 == 0 else 1 + request.seed % short
            return max(1, whole - written)

        async def reward(prompt: Prompt, sample: Sample) -> float:
            if away_from <= loop_time() < away_from + away_s:
                self.outage_failures += 1
                raise ConnectionError("refused")
            if hash((prompt.row, prompt.epoch, sample.index)) % 100 < share_failing:
                self.failed_rewards += 1
                raise ValueError("no reward")
            await asyncio.sleep(0.001 * (prompt.row % 3))
            return float(sample.index)

        def keep(group: ScoredGroup) -> str | None:
            if hash((group.prompt.row, group.prompt.epoch, 7)) % 100 < share_rejected:
                self.filtered.append(which(group.prompt))
                return f"reason {group.prompt.row % 2}"
            return None

        def spoils(batch: Batch) -> bool:
            is_spoiled = batch.step > 0 and hash((batch.step, batch.groups[0].group_id)) % 100 < share_spoiled
            self.num_spoiled += is_spoiled
            return is_spoiled

        self.world = World(
            skips=1000, spoils=spoils, lengths=lengths, reward=reward, keep=keep, pick=fussy if picky else None, **plan
        )

    def live(self) -> None:
        """Run to the end, or until the cancellation."""
        run_virtually(self._main())

    async def _main(self) -> None:
        try:
            async with asyncio.timeout(self.cancel_at):
                await self._lived()
        except (TimeoutError, FailureBudgetSpent, FilterBudgetSpent):
            pass

    async def _lived(self) -> None:
        with plainly():
            async with asyncio.TaskGroup() as both:
                running = both.create_task(self.world.main())
                for _ in range(self.rejoins):
                    await asyncio.sleep(0.03)
                    self.world.updater.rejoined.set()
                for place in range(self.squeezes):
                    await asyncio.sleep(0.05)
                    slots = self.world.all_slots
                    slots.set_limit(1 + place * 7 % slots.size)
                await running
        self.has_ended = True

    @property
    def trained(self) -> list[tuple[int, int]]:
        """The prompt of every trained group, repeated as often as it was trained."""
        return [which(group.prompt) for batch in self.world.trainer.batches for group in batch.groups]


def which(prompt: Prompt) -> tuple[int, int]:
    return prompt.epoch, prompt.row


def fussy(step: int, waiting: Any, size: int) -> Picked:
    """A buffer filter that drops every seventh group, never takes the one before it, and else takes the youngest."""
    drop = {group.group_id: "seventh" for group in waiting if group.group_id % 7 == 6}
    liked = [group.group_id for group in waiting if group.group_id % 7 < 5]
    return Picked(train=tuple(liked[-size:]), drop=drop)


CHOICES: dict[str, tuple[Any, ...]] = {
    "steps": (1, 2, 3),
    "groups_per_step": (1, 2, 3),
    "group_size": (1, 2),
    "interval": (1, 2, 3),
    "staleness": (0, 1, 2, 3),  # above the least that the interval allows
    "slots": (1, 2, 3, 5, 8, 12),
    "over_sampling": (None, None, 0, 2, 5),  # beyond a batch
    "buffer_size": (None, None, 1, 2),  # in batches
    "stale": ("wait", "mask", "drop"),
    "partial": (False, True),
    "mask_resumed": (False, True),
    "abort": (False, True),
    "short": (1, 2, 9),
    "tail": (1, 5),
    "train_seconds": (0.01, 0.1, 1.0),
    "update_seconds": (0.0, 0.05),
    "trains_during_updates": (False, True),
    "interrupted_updates": (0, 0, 2),
    "keeps_copies": (True, False),
    "rejoins": (0, 0, 3),
    "failures": (0, 0, 3),
    "retries": (0, 2),
    "failing": (0, 0, 8),
    "rejected": (0, 0, 20, 50),
    "picky": (False, False, False, True),
    "rows": (1, 3, 40),
    "held_out": (0, 0, 2),
    "eval_interval": (None, 2),
    "squeezes": (0, 0, 6),
    "away": ((0.0, 0.0), (0.0, 0.0), (0.03, 30.0), (0.2, 0.5)),  # start and length of an outage of the rewards
    "spoiled": (0, 0, 40),
    "cancel_at": (None, None, None, 0.02, 0.3),
}
"""Values of each field of a plan; the first is the plainest."""


def plan_of(draws: bytes) -> dict[str, Any]:
    """The plan that the bytes choose."""
    return {**resolved(drawn(CHOICES, draws), "g{group}.{sample}"), "max_failed_groups": 20, "chunk": 24}


def resolved(plan: dict[str, Any], requests: str) -> dict[str, Any]:
    """The plan with numbers of groups in the place of numbers of batches, and failures by request.

    ``requests`` is a format of the names of requests that fail once.
    """
    batch = plan["groups_per_step"]
    more, batches = plan["over_sampling"], plan["buffer_size"]
    failures = {
        requests.format(group=group, sample=group % 2, turn=group % 3): (EngineLost if group % 2 else EngineTimeout)(
            "gone"
        )
        for group in range(plan["failures"])
    }
    return {
        **plan,
        "staleness": plan["staleness"] + plan["interval"] - 1,
        "over_sampling": None if more is None else batch + more,
        "buffer_size": None if batches is None else batch * batches,
        "failures": failures,
    }


@settings(
    max_examples=HISTORIES // TOGETHER + 1,  # the first is all zeros
    phases=(Phase.generate, Phase.shrink),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=TOGETHER * len(CHOICES), max_size=TOGETHER * len(CHOICES)))
@pytest.mark.timeout(360)
def test_over_random_histories_nothing_is_too_old_or_lost(draws: bytes) -> None:
    logging.disable(logging.CRITICAL)  # thousands of unread warnings take a fifth of the time
    try:
        for each in batched(draws, len(CHOICES)):
            with named(plan := plan_of(bytes(each))):
                live_and_check(Story(plan))
    finally:
        logging.disable(logging.NOTSET)


def live_and_check(story: Story) -> None:
    story.live()
    world = story.world
    assert max(world.lags, default=0) <= world.staleness
    assert world.engine.most_busy <= world.slots
    assert world.engine.busy == 0
    assert world.all_slots.in_use == 0
    stats = world.scheduler.stats()  # checks both accounts
    assert all(count >= 0 for count in vars_of(stats.groups) + vars_of(stats.tokens))
    assert_finished_once(story, stats)
    if not story.failed_rewards and not world.failures and not story.num_spoiled:
        assert stats.groups.failed == 0, "an outage loses nothing"
    if story.has_ended:
        ended_clean(world, stats, story.num_spoiled)


def ended_clean(world: World, stats: SchedulerStats, num_spoiled: int = 0) -> None:
    """Assert that a run that came to its end holds nothing; ``num_spoiled`` of its batches were skipped."""
    assert len(world.trainer.batches) == world.steps - num_spoiled
    assert stats.groups.trained == (world.steps - num_spoiled) * world.groups_per_step
    assert world.all_slots.claimed == 0
    assert stats.tokens.held == 0
    groups, lengths = stats.groups, stats.lengths
    assert groups.in_flight == groups.partial == groups.buffered == groups.training == 0
    assert lengths.finished == lengths.trained + lengths.filtered + lengths.dropped


def vars_of(counts: Any) -> list[int]:
    return [getattr(counts, name) for name in counts.__dataclass_fields__]


def assert_finished_once(story: Story, stats: SchedulerStats) -> None:
    """Assert that every prompt was trained, filtered or failed exactly once, or is unfinished."""
    often = Counter(story.trained) + Counter(story.filtered)
    assert all(count == 1 for count in often.values())
    counts = stats.groups
    settled = counts.trained + counts.filtered + counts.failed + counts.quarantined
    open_groups = counts.in_flight + counts.partial + counts.buffered + counts.training
    assert story.world.prompts.taken == settled + open_groups + stats.returned
