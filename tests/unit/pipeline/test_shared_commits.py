"""Finished groups share commits of the journal, and no batch waits for a commit that could be written at once."""

import asyncio
from typing import Any

import pytest

from asyncrl.buffer.journal import Finished, Record
from asyncrl.types import Request
from tests.unit.pipeline.harness import World, uneven

COMMIT_S = 30.0
"""Seconds until a commit is written without a hurry: longer than any step."""


class LazyJournal:
    """A journal that writes only in a hurry or after ``COMMIT_S``, to a disk that takes ``disk_s`` seconds."""

    def __init__(self, disk_s: float = 0.0) -> None:
        self._disk_s = disk_s
        self.queued = list[Record]()
        self.commits = list[int]()
        """Finished groups in each commit that has any."""
        self._written = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def append(self, record: Record) -> int:
        """Queue a record."""
        self.queued.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COMMIT_S, self.hurry)
        return 0

    def begin_segment(self, snapshot: Record) -> int:
        """Queue the snapshot."""
        return self.append(snapshot)

    def checkpointed(self, step: int) -> None:
        """Delete nothing."""

    def hurry(self) -> None:
        """Write what is queued."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if num_groups := sum(isinstance(record, Finished) for record in self.queued):
            self.commits.append(num_groups)
        self.queued.clear()
        written, self._written = self._written, asyncio.Event()
        asyncio.get_running_loop().call_later(self._disk_s, written.set)

    async def durable(self, sequence: int) -> None:
        """Wait for the next commit, unless nothing is queued."""
        if self.queued:
            await self._written.wait()


def recorded(disk_s: float = 0.0, **plan: Any) -> tuple[World, LazyJournal]:
    """Run with such a journal."""
    world = World(**plan, journal=LazyJournal(disk_s))
    return world.run(), world.journal


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("train_seconds", [0.1, 1.0, 5.0])
def test_no_batch_waits_for_a_commit(staleness: int, train_seconds: float) -> None:
    plan: dict[str, Any] = {"steps": 8, "staleness": staleness, "train_seconds": train_seconds, "lengths": uneven}
    world, journal = recorded(**plan)
    assert world.seconds == World(**plan).run().seconds
    assert sum(journal.commits) == 8 * 4


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_batch_that_is_complete_in_time_does_not_wait_for_a_slow_disk(staleness: int) -> None:
    # Groups take 2 s at most, and a step takes 10 s.  So only the first batch is asked for before it is complete.
    plan: dict[str, Any] = {
        "steps": 6,
        "staleness": staleness,
        "groups_per_step": 8,
        "lengths": uneven,
        "train_seconds": 10.0,
    }
    world, _ = recorded(disk_s=1.0, **plan)
    assert world.seconds < World(**plan).run().seconds + 1.01


@pytest.mark.parametrize("train_seconds", [0.1, 1.0])
def test_no_group_is_dropped_because_it_waits_for_others(train_seconds: float) -> None:
    def lengths(request: Request) -> int:
        return 5 + request.seed % 400

    plan: dict[str, Any] = {
        "steps": 8,
        "stale": "drop",
        "over_sampling": 7,
        "train_seconds": train_seconds,
        "lengths": lengths,
    }
    stale = [run.facts[-1].scheduler.groups.stale for run in (recorded(**plan)[0], World(**plan).run())]
    assert stale[0] == stale[1] > 0


def test_groups_that_finish_while_the_trainer_works_are_one_commit() -> None:
    # The first batch needs its last group, and the two batches that follow are finished before the first is trained.
    _, journal = recorded(steps=3, staleness=2, groups_per_step=8, lengths=uneven, train_seconds=10.0)
    assert sum(journal.commits) == 3 * 8
    assert len(journal.commits) <= 4
