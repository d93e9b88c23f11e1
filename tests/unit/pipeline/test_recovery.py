"""A run that is killed at any moment and recovers from checkpoint and journal loses no finished group."""

import asyncio
import logging
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.buffer import Dispatch
from asyncrl.buffer.journal import Finished, Grown, HeldGroup, Left, PromptPlace, Record, Snapshot
from asyncrl.buffer.journal.reader import opened
from asyncrl.buffer.journal.segments import Disk
from asyncrl.buffer.journal.writer import Checkpointed, End, JournalWriter
from asyncrl.engines.fake import FakeCheckpoints, FakePrompts
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.pipeline.recovery import Recovery, consecutive, recovery
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import (
    Batch,
    Chunk,
    FinishReason,
    GroupId,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    Weights,
)
from tests.unit.pipeline.harness import World, drawn, named
from tests.virtual_time import lengths_in_rotation, run_virtually

DURABLE_S = 0.05
"""Seconds until a record is on the disk."""


class FastDisk(Disk):
    """A disk that survives everything but a power failure."""

    def sync(self, descriptor: int) -> None:
        """Do nothing."""


class SlowJournal:
    """A journal whose records are on the disk after ``DURABLE_S``; the last ones are lost in a kill."""

    def __init__(self) -> None:
        self.items: list[tuple[float, Record | Checkpointed]] = []
        self.delivered = 0

    def append(self, record: Record) -> int:
        """Keep a record and return its sequence number."""
        self.items.append((asyncio.get_running_loop().time(), record))
        return len(self.items)

    def begin_segment(self, snapshot: Snapshot) -> int:
        """Keep the snapshot."""
        return self.append(snapshot)

    def hurry(self) -> None:
        """See ``Journal.hurry``.  Every record takes the same time."""

    async def durable(self, sequence: int) -> None:
        """Wait until the record is on the disk."""
        await asyncio.sleep(self.items[sequence - 1][0] + DURABLE_S - asyncio.get_running_loop().time())

    def checkpointed(self, step: int) -> None:
        """Note the completion."""
        self.items.append((asyncio.get_running_loop().time(), Checkpointed(step=step)))

    def written(self, now: float, torn: float) -> list[Record | Checkpointed]:
        """Return what is on the disk at ``now``: everything older than ``DURABLE_S``, and a share of the rest."""
        sure = [item for since, item in self.items if since + DURABLE_S <= now]
        rest = [item for since, item in self.items if since + DURABLE_S > now]
        return sure + rest[: round(torn * len(rest))]


def write(folder: Path, epoch: int, items: list[Record | Checkpointed], delivered: int) -> None:
    """Write a journal as the thread of a run does."""
    writer = JournalWriter(folder, epoch, delivered=lambda: delivered, on_commit=lambda: None, disk=FastDisk())
    number = 0
    for item in (*items, End()):
        number += not isinstance(item, Checkpointed | End)
        writer.queue.append((number, item))
    writer.run()


class Life:
    """A run that is killed again and again, and recovers each time."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self.folder = folder
        self.plan = plan
        self.writing_s = plan.pop("writing_s", 0.1)
        self.checkpoint: RunState | None = None
        self.recovered: Recovery | None = None
        self.part_no = 0
        self.batches: dict[int, Batch] = {}
        """The last batch of each step."""
        self.finished: dict[GroupId, ScoredGroup] = {}
        """Groups whose content is on the disk."""

    def part(self, kill_at: float | None, torn: float = 0.0, rejoin_at: float | None = None) -> World:
        """Run until ``kill_at``, and read checkpoint and journal as the next start does.

        Engines that were lost come back at ``rejoin_at``.
        """
        journal, checkpoints = SlowJournal(), FakeCheckpoints(self.writing_s)
        world = World(**self.plan, checkpoints=checkpoints, recovery=self.recovered, journal=journal)
        now = run_virtually(until(world, kill_at, rejoin_at))[1]
        self._check(world)
        if (found := checkpoints.found(now)) is not None:
            self.checkpoint = RunState.from_json(orjson.loads(orjson.dumps(found)))
        self.part_no += 1
        items = journal.written(now, torn)
        delivered = world.scheduler.num_delivered if hasattr(world, "scheduler") else 0
        write(self.folder, self.part_no, items, delivered)
        self._note(items)
        prompts = FakePrompts(self.plan.get("rows", 1_000_000))
        self.recovered = recovered(self.folder, self.checkpoint, prompts, self.plan["steps"])
        return world

    def _check(self, world: World) -> None:
        first = self.recovered.before.step if self.recovered else 0
        again = {batch.step for batch in self.recovered.restored.batches} if self.recovered else set()
        for place, batch in enumerate(world.trainer.batches):
            assert batch.step == first + place
            if batch.step in again and batch.step in self.batches:
                assert content(batch) == content(self.batches[batch.step]), "another batch than before"
            self.batches[batch.step] = batch
            for group in batch.groups:
                if (kept := self.finished.get(group.group_id)) is not None and not world.partial:
                    assert tokens(group) == tokens(kept), "generated again"
        assert all(0 <= lag <= world.staleness for lag in world.lags)
        self._check_continued(world)
        asked = {int(request.request_id[1:].split(".")[0].split("~")[0]) for request in world.engine.requests}
        assert not asked & self._settled(), "a finished group was generated again"

    def _check_continued(self, world: World) -> None:
        """Answers that the journal had in part continue behind their tokens."""
        in_flight = self.recovered.restored.in_flight if self.recovered else ()
        had = {each.group_id: parts(each.grown) for each in in_flight if each.grown}
        for batch in world.trainer.batches:
            for group in batch.groups:
                for index, before in had.get(group.group_id, {}).items():
                    sample = group.samples[index].sample
                    assert sample.token_ids[: len(before)] == before, "generated again"
        prompts = {each.group_id: each.prompt.token_ids for each in in_flight}
        for request in world.engine.requests:
            name, place = request.request_id[1:].split(".")
            group_id = GroupId(int(name.split("~")[0]))
            if written := had.get(group_id, {}).get(int(place.partition("-")[0])):
                start = len(prompts[group_id])
                assert request.token_ids[start : start + len(written)] == written, "the engine did not get the tokens"

    def _settled(self) -> set[int]:
        if self.recovered is None:
            return set()
        restored = self.recovered.restored
        groups = [*(group for batch in restored.batches for group in batch.groups), *restored.buffered]
        return {group.group_id for group in groups}

    def _note(self, items: list[Record | Checkpointed]) -> None:
        for item in items:
            if isinstance(item, Finished):
                self.finished[item.group.group_id] = item.group
            elif isinstance(item, Left):
                self.finished.pop(item.group_id, None)


def recovered(folder: Path, checkpoint: RunState | None, prompts: FakePrompts, steps: int) -> Recovery | None:
    """Return what the journal has since ``checkpoint``; None only before the first state is on the disk."""
    found = recovery(folder, checkpoint, {}, prompts.at, num_steps=steps)
    assert found is not None or checkpoint is None
    assert not isinstance(found, str), found
    return found


def parts(grown: Sequence[Grown]) -> dict[int, tuple[int, ...]]:
    """The tokens of each answer by its index."""
    found: dict[int, tuple[int, ...]] = {}
    for each in grown:
        assert each.start == len(found.get(each.index, ()))
        found[each.index] = (*found.get(each.index, ()), *each.chunk.token_ids)
    return found


async def until(world: World, kill_at: float | None, rejoin_at: float | None = None) -> None:
    if rejoin_at is not None:
        asyncio.get_running_loop().call_later(rejoin_at, lambda: world.updater.rejoined.set())
    try:
        async with asyncio.timeout(kill_at):
            await world.main()
    except TimeoutError:
        pass


def content(batch: Batch) -> list[Any]:
    """The groups of a batch without versions: a recovered run counts them on."""
    return [
        (
            group.group_id,
            group.prompt.row,
            scored.sample.token_ids,
            [(span.weights.step, span.start, span.stop) for span in scored.sample.spans],
            scored.reward,
            scored.loss_mask,
        )
        for group in batch.groups
        for scored in group.samples
    ]


def tokens(group: ScoredGroup) -> list[Any]:
    """The tokens of a group."""
    return [scored.sample.token_ids for scored in group.samples]


@pytest.mark.parametrize("kill_at", [0.04, 0.3, 1.3, 1.95, 2.5, 4.4, 5.9])
def test_without_staleness_a_killed_run_trains_what_an_unkilled_one_trains(tmp_path: Path, kill_at: float) -> None:
    plan: dict[str, Any] = {"steps": 6, "staleness": 0, "lengths": lengths_in_rotation((3, 9, 20)), "rows": 7}
    straight = World(**plan).run()
    life = Life(tmp_path, {**plan, "save_interval": 2})
    life.part(kill_at)
    last = life.part(None)
    assert [content(life.batches[step]) for step in range(6)] == [content(batch) for batch in straight.trainer.batches]
    one, other = straight.facts[-1].scheduler, last.facts[-1].scheduler
    assert replace(other.tokens, lost=0) == one.tokens
    assert other.groups == one.groups


def test_a_batch_has_its_order_though_a_younger_group_was_finished_at_the_kill(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"steps": 2, "staleness": 0}
    plan["lengths"] = lambda request: 60 if request.request_id.startswith("g0.") else 3
    straight = World(**plan).run()
    life = Life(tmp_path, plan)
    life.part(0.5)
    assert life.recovered is not None
    restored = life.recovered.restored
    buffered = [group.group_id for group in restored.buffered]
    assert min(group.group_id for group in restored.in_flight) < min(buffered), "an older group was in flight"
    life.part(None)
    assert [content(life.batches[step]) for step in range(2)] == [content(batch) for batch in straight.trainer.batches]


def test_finished_groups_are_trained_and_groups_in_flight_start_again_with_their_ids(tmp_path: Path) -> None:
    life = Life(tmp_path, {"steps": 4, "staleness": 3, "lengths": lengths_in_rotation((4, 200)), "slots": 64})
    first = life.part(1.5)
    assert life.recovered is not None
    restored = life.recovered.restored
    assert restored.batches or restored.buffered
    assert restored.in_flight
    assert not first.facts or first.facts[-1].scheduler.tokens.lost == 0
    last = life.part(None)
    stats = last.facts[-1].scheduler
    assert stats.groups.admitted == stats.groups.trained + stats.groups.stale == 16 + stats.groups.stale
    assert stats.tokens.lost > 0


def test_groups_start_again_although_a_restarted_engine_had_newer_weights_before_the_kill(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"steps": 4, "staleness": 2, "interval": 3, "groups_per_step": 1, "watchdog_s": 20.0}
    plan["lengths"] = lambda request: 300 if request.request_id.startswith(("g1.", "g2.")) else 8
    life = Life(tmp_path, plan)
    life.part(1.85, rejoin_at=1.5)
    assert life.recovered is not None
    restored = life.recovered.restored
    assert [batch.step for batch in restored.batches] == [0]
    assert [(group.group_id, group.dispatched.step) for group in restored.buffered] == [(3, 1)]
    assert [each.group_id for each in restored.in_flight] == [1, 2]
    last = life.part(None)
    assert sorted(ids for batch in last.trained_ids for ids in batch) == [0, 1, 2, 3]
    assert [weights.step for weights in last.updater.published] == [1, 3]


def test_a_journal_that_does_not_fit_is_named_and_not_used(tmp_path: Path) -> None:
    life = Life(tmp_path, {"steps": 4, "staleness": 3, "save_interval": 4})
    life.part(2.5)
    assert life.recovered is not None
    assert life.recovered.restored.batches
    prompts = FakePrompts()
    other = recovery(tmp_path, None, {"max-staleness": "2"}, prompts.at, num_steps=4)
    assert isinstance(other, str)
    assert other.endswith("start again: max-staleness was None, is 2")
    shorter = recovery(tmp_path, None, {}, prompts.at, num_steps=1)
    assert isinstance(shorter, str)
    assert shorter.endswith("num-rollout is 1")


def test_a_journal_without_the_checkpoint_is_named_and_not_used(tmp_path: Path) -> None:
    life = Life(tmp_path, {"steps": 4, "staleness": 3})
    life.part(2.5)
    assert life.recovered is not None
    before = replace(life.recovered.before, step=0, mark="of a run whose journal was off")
    found = recovery(tmp_path, before, {}, FakePrompts().at, num_steps=4)
    assert isinstance(found, str)
    assert found.endswith("it belongs to another checkpoint")
    assert recovery(tmp_path, replace(before, step=3), {}, FakePrompts().at, num_steps=4) is None


def killed_within_answers(folder: Path) -> tuple[Life, Recovery]:
    """A life with partial rollouts that was killed while short answers had ended and long ones were under way."""
    life = Life(
        folder, {"steps": 4, "staleness": 3, "lengths": lengths_in_rotation((40, 200)), "slots": 64, "partial": True}
    )
    life.part(1.0)
    assert life.recovered is not None
    return life, life.recovered


def test_partial_answers_continue_behind_their_tokens(tmp_path: Path) -> None:
    life, recovered = killed_within_answers(tmp_path)
    kept = [each for each in recovered.restored.in_flight if each.grown]
    assert kept
    assert recovered.before.tokens.lost < sum(each.num_tokens for each in kept)
    last = life.part(None)
    assert last.facts[-1].scheduler.groups.trained == 16


def test_an_answer_that_had_ended_in_a_group_in_flight_is_not_continued(tmp_path: Path) -> None:
    life, recovered = killed_within_answers(tmp_path)
    ended = {
        (each.group_id, index): written
        for each in recovered.restored.in_flight
        for index, written in parts(each.grown).items()
        if len(written) == 40
    }
    assert len(ended) > 2
    last = life.part(None)
    asked = {request.request_id.replace("~1", "") for request in last.engine.requests}
    assert not asked & {f"g{group_id}.{index}" for group_id, index in ended}
    trained = {
        (group.group_id, scored.sample.index): (scored.sample.token_ids, scored.sample.finish)
        for batch in last.trainer.batches
        for group in batch.groups
        for scored in group.samples
    }
    assert {place: trained.get(place) for place in ended} == {
        place: (written, FinishReason.STOP) for place, written in ended.items()
    }


def test_a_repeated_part_of_an_answer_replaces_what_followed_and_a_gap_ends_it() -> None:
    def piece(start: int, stop: int, index: int = 0) -> Grown:
        chunk = Chunk(token_ids=tuple(range(start, stop)), logprobs=array("f", [0.0] * (stop - start)), version=0)
        weights = Weights(version=0, step=0)
        return Grown(group_id=GroupId(1), index=index, start=start, weights=weights, chunk=chunk)

    whole = [piece(0, 4), piece(0, 2, index=1), piece(4, 8), piece(2, 3, index=1)]
    assert parts(consecutive(whole)) == {0: tuple(range(8)), 1: (0, 1, 2)}
    assert parts(consecutive([*whole, piece(4, 6)])) == {0: tuple(range(6)), 1: (0, 1, 2)}
    assert parts(consecutive([piece(0, 4), piece(5, 9)])) == {0: tuple(range(4))}


def snapshot_of_a_group_in_flight() -> Snapshot:
    """A snapshot of version 0, with ten tokens in flight."""
    state = RunState(
        step=0,
        version=0,
        next_id=1,
        prompts_taken=1,
        outstanding=((0, 0),),
        tokens=TokenCounts(generated=10, held=10),
        groups=GroupCounts(admitted=1, in_flight=1),
        reasons={},
        verdicts=(),
        retries=0,
        aborts=0,
    )
    held = HeldGroup(group_id=GroupId(0), place=PromptPlace(epoch=0, row=0), is_buffered=False)
    return Snapshot(step=0, state={**state.as_json(), "about": {}}, held=(held,))


def test_versions_continue_behind_one_that_no_record_tells_but_that_of_a_group(tmp_path: Path) -> None:
    first, second = Weights(version=0, step=0), Weights(version=1, step=1)
    sample = Sample(
        index=0,
        token_ids=(1, 2),
        logprobs=array("f", [-1.0, -1.0]),
        spans=(Span(weights=first, start=0, stop=1), Span(weights=second, start=1, stop=2)),
        text="",
        finish=FinishReason.STOP,
        seconds=0.1,
    )
    group = ScoredGroup(
        group_id=GroupId(0),
        prompt=FakePrompts().at(0, 0),
        dispatched=first,
        samples=(ScoredSample(sample=sample, reward=1.0, loss_mask=(1, 1)),),
    )
    finished = Finished(dispatch=Dispatch(order=1, deadline=1, group_id=GroupId(0)), group=group)
    write(tmp_path, 1, [snapshot_of_a_group_in_flight(), finished], delivered=10)
    found = recovered(tmp_path, None, FakePrompts(), 2)
    assert found is not None
    assert [each.group_id for each in found.restored.buffered] == [group.group_id]
    assert found.before.version == 1


def test_tokens_in_flight_at_a_snapshot_are_lost_if_the_journal_ends_with_it(tmp_path: Path) -> None:
    write(tmp_path, 1, [snapshot_of_a_group_in_flight()], delivered=10)
    (segment,) = opened(tmp_path)
    os.truncate(segment.segment.path, next(segment.frames()).stop)
    found = recovered(tmp_path, None, FakePrompts(), 1)
    assert found is not None
    assert found.before.tokens == TokenCounts(lost=10)


CHOICES: dict[str, tuple[Any, ...]] = {
    "steps": (1, 2, 3, 4, 5, 6),
    "groups_per_step": (1, 2, 3),
    "group_size": (1, 2),
    "staleness": (0, 1, 2, 3),
    "interval": (1, 2),
    "slots": (1, 3, 8),
    "stale": ("wait", "mask", "drop"),
    "partial": (False, True),
    "abort": (False, True),
    "train_seconds": (0.01, 0.3),
    "rows": (1, 3, 40),
    "rejected": (0, 20),
    "failing": (0, 5),
    "tail": (1, 9),
    "save_interval": (1, 2, 3),
    "writing_s": (0.0, 0.1, 1.0),
    "kills": (0, 1, 2, 3),
}
"""Values of each field of a life; the first is the plainest."""
MOST_KILLS = 3
LAST_KILL_S = 1.5
LIVES = 150
TOGETHER = 10
SIZE = len(CHOICES) + 3 * MOST_KILLS
"""Bytes that make a life: one for each choice, two for the time of each kill, and one for what it tears."""


@pytest.mark.timeout(720)
@settings(
    max_examples=LIVES // TOGETHER + 1,
    phases=(Phase.generate, Phase.shrink),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.binary(min_size=TOGETHER * SIZE, max_size=TOGETHER * SIZE))
def test_over_random_kills_no_finished_group_is_lost(draws: bytes) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for each in batched(draws, SIZE):
            plan = drawn(CHOICES, bytes(each[: len(CHOICES)]))
            kills = [
                (LAST_KILL_S * (256 * high + low) / 0xFFFF, torn / 255)
                for high, low, torn in batched(each[len(CHOICES) :], 3)
            ]
            with named(plan), tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                live(Path(folder), plan, kills[: plan.pop("kills")])
    finally:
        logging.disable(logging.NOTSET)


def live(folder: Path, plan: dict[str, Any], kills: list[tuple[float, float]]) -> None:
    """Live to the end, with kills at times and with shares of the last records on the disk."""
    rejected, failing, tail = plan.pop("rejected"), plan.pop("failing"), plan.pop("tail")
    if plan["interval"] > plan["staleness"] + 1:
        plan["interval"] = 1

    async def reward(prompt: Prompt, sample: Sample) -> float:
        if hash((prompt.epoch, prompt.row, 1)) % 100 < failing:
            raise ValueError("no reward")
        return float(sample.index)

    def keep(group: ScoredGroup) -> str | None:
        return "bad" if hash((group.prompt.epoch, group.prompt.row, 1)) % 100 < rejected + failing else None

    functions: dict[str, Any] = {"reward": reward, "keep": keep, "lengths": lambda request: 1 + request.seed % 5 * tail}
    life = Life(folder, {**plan, **functions, "max_failed_groups": 30, "max_filtered_groups": 500, "chunk": 24})
    for kill_at, torn in kills:
        if life.checkpoint is None or life.checkpoint.step < plan["steps"]:
            life.part(kill_at, torn)
    if life.checkpoint is not None and life.checkpoint.step == plan["steps"]:
        return
    world = life.part(None)
    stats = world.facts[-1].scheduler
    assert stats.groups.trained == plan["steps"] * plan["groups_per_step"]
    rows = plan["rows"]
    assert life.checkpoint is not None
    done = {divmod(position, rows) for position in range(life.checkpoint.prompts_taken)} - set(
        life.checkpoint.outstanding
    )
    trained = Counter(
        (group.prompt.epoch, group.prompt.row) for batch in life.batches.values() for group in batch.groups
    )
    assert set(trained.values()) <= {1}, "trained twice"
    counts = life.checkpoint.groups
    assert counts.trained + counts.filtered + counts.failed == len(done)
    bad = {each for each in done if hash((*each, 1)) % 100 < rejected + failing}
    assert set(trained) == done - bad, "neither trained nor bad"
