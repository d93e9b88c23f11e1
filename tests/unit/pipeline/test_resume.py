"""A run that ends at any moment and resumes from its last checkpoint loses no prompt and trains none twice."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from itertools import batched
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.metrics.names import METRICS
from asyncrl.metrics.reporter import Reporter
from asyncrl.pipeline.scheduling import run_state
from asyncrl.pipeline.scheduling.quarantine import FailedRow, Quarantine
from asyncrl.pipeline.scheduling.run_state import RunState, without_unfinished
from asyncrl.types import Prompt, Sample, ScoredGroup
from tests.unit.pipeline.harness import World, drawn, named
from tests.virtual_time import lengths_in_rotation, run_virtually

Which = tuple[int, int]
"""Epoch and row of a prompt."""


def which(prompt: Prompt) -> Which:
    return prompt.epoch, prompt.row


def trained(world: World) -> list[Which]:
    return [which(group.prompt) for batch in world.trainer.batches for group in batch.groups]


def stored(found: dict[str, Any]) -> RunState:
    """The run state after a round trip through a file."""
    return RunState.from_json(orjson.loads(orjson.dumps(found)))


def taken(state: RunState, rows: int) -> set[Which]:
    return {divmod(position, rows) for position in range(state.prompts_taken)}


def test_a_stored_prompt_comes_back_equal() -> None:
    prompt = Prompt(
        row=3,
        epoch=1,
        text="Hi",
        token_ids=(1, 2),
        label="a",
        metadata={"x": [1]},
        messages=({"role": "user", "content": "Hi"},),
        template_variables={"enable_thinking": False},
    )
    assert run_state._prompt(orjson.loads(orjson.dumps(asdict(prompt)))) == prompt  # noqa: SLF001


def test_a_checkpoint_follows_every_nth_step_and_the_last() -> None:
    checkpoints = FakeCheckpoints()
    World(steps=5, save_interval=2, checkpoints=checkpoints).run()
    assert sorted(checkpoints.written) == [2, 4, 5]
    last = FakeCheckpoints()
    World(steps=5, checkpoints=last).run()
    assert sorted(last.written) == [5]


def test_training_waits_for_the_copy_and_not_for_the_writing() -> None:
    plain = World(steps=6).run()
    slow = World(steps=6, save_interval=3, checkpoints=FakeCheckpoints(seconds=2.0)).run()
    assert slow.seconds == pytest.approx(
        plain.seconds + 1.8
    )  # its end waits for the last one, during an update of 0.2 s
    assert [facts.checkpoint_s for facts in slow.facts] == [None, None, 0.0, None, None, 0.0]


def test_a_second_save_waits_for_the_first() -> None:
    world = World(steps=2, train_seconds=1.0, save_interval=1, checkpoints=FakeCheckpoints(seconds=10.0)).run()
    assert world.facts[0].checkpoint_s == 0.0
    assert world.facts[1].checkpoint_s == pytest.approx(8.8, abs=0.3)  # 10 s less a step


def test_without_staleness_a_run_in_two_parts_is_the_run_in_one() -> None:
    plan: dict[str, Any] = {"steps": 6, "staleness": 0, "lengths": lengths_in_rotation((3, 9, 20)), "rows": 7}
    straight = World(**plan).run()
    first = World(**(plan | {"steps": 4}), checkpoints=FakeCheckpoints()).run()
    assert first.checkpoints is not None
    second = World(**plan, before=stored(first.checkpoints.written[4])).run()
    batches = [*first.trainer.batches, *second.trainer.batches]
    assert [batch.step for batch in batches] == list(range(6))
    assert [content(batch) for batch in batches] == [content(batch) for batch in straight.trainer.batches]
    one, other = straight.facts[-1].scheduler, second.facts[-1].scheduler
    assert (one.tokens, one.groups, one.weights) == (other.tokens, other.groups, other.weights)


def content(batch: Any) -> list[Any]:
    return [
        (group.group_id, which(group.prompt), scored.sample.token_ids, scored.sample.spans, scored.reward)
        for group in batch.groups
        for scored in group.samples
    ]


def test_held_groups_count_as_stale_after_a_resume_and_their_prompts_return() -> None:
    world = World(
        steps=4, staleness=3, lengths=lengths_in_rotation((4, 40)), save_interval=2, checkpoints=FakeCheckpoints()
    )
    world.run()
    assert world.checkpoints is not None
    state = stored(world.checkpoints.written[2])
    assert state.outstanding
    assert state.groups.stale == len(state.outstanding)
    assert state.groups.admitted == state.groups.trained + state.groups.stale
    assert state.tokens.held == 0
    assert state.tokens.generated == state.tokens.trained + state.tokens.stale
    again = World(steps=4, staleness=3, before=state).run()
    first_ids = sorted(again.trained_ids[0])
    assert first_ids == list(range(state.next_id, state.next_id + 4))
    assert trained(again)[: len(state.outstanding)] == list(state.outstanding)[: len(trained(again))]
    stats = again.facts[-1].scheduler
    assert stats.groups.trained == 16
    assert stats.weights.version == 4


def test_evaluations_resume_at_their_position() -> None:
    plan: dict[str, Any] = {"steps": 8, "eval_interval": 2, "held_out": 3}
    state = {step: stored(found) for step, found in _all_checkpoints(World(**plan, save_interval=1)).items()}
    due, between = World(**plan, before=state[4]).run(), World(**plan, before=state[5]).run()
    assert _evaluated(due) == [4, 6, 8]  # that of step 4 was lost, if it was not over
    assert _evaluated(between) == [6, 8]


def test_a_count_that_begins_again_is_one_since_the_start_and_any_other_is_so_far() -> None:
    """The names of metrics tell which counts a resumed run continues."""
    state = stored(_all_checkpoints(World(steps=4, save_interval=2))[2])
    resumed = World(steps=4, before=state).run()
    row = Reporter([], state.tokens).row(resumed.facts[0])
    meanings = {metric.name: metric.meaning for metric in METRICS}
    assert (row["groups/trained"], row["length/trained"]) == (12, 8)
    assert "so far" in meanings["groups/trained"]
    assert all("since the start" in meanings[name] for name in ("length/trained", "length/finished", "length/cut"))


def _all_checkpoints(world: World) -> dict[int, dict[str, Any]]:
    world.checkpoints = FakeCheckpoints()
    world.run()
    return world.checkpoints.written


def _evaluated(world: World) -> list[int]:
    return [facts.evaluation.weights.step for facts in world.facts if facts.evaluation]


def test_an_invalid_run_state_is_refused() -> None:
    state = stored(_all_checkpoints(World(steps=1))[1])
    assert stored(state.as_json()) == state
    assert stored({**state.as_json(), "of_a_later_version": 1}) == state
    for broken in ({}, {**state.as_json(), "outstanding": [1]}, {**state.as_json(), "tokens": 1}):
        with pytest.raises(ValueError, match="not a state of a run"):
            RunState.from_json(broken)


def test_a_run_has_no_state_within_a_step() -> None:
    stats = World(steps=1).run().facts[-1].scheduler
    counts = {name: getattr(stats.groups, name) for name in stats.groups.__dataclass_fields__}
    with pytest.raises(AssertionError, match="in training"):
        without_unfinished(stats.tokens, type(stats.groups)(**(counts | {"training": 1})))


# ---- random histories


class Life:
    """A run that ends again and again, and is resumed each time."""

    def __init__(self, plan: dict[str, Any]) -> None:
        rejected, failing, tail = plan.pop("rejected"), plan.pop("failing"), plan.pop("tail")
        poison: int | None = plan.pop("poison")
        self.failed_rows: dict[int, FailedRow] = {}
        self.plan = plan
        self.rows = plan["rows"]
        self.writing_s = plan.pop("writing_s")
        self.bad: Callable[[Prompt], bool] = lambda prompt: (
            prompt.row == poison or hash((prompt.epoch, prompt.row, 1)) % 100 < rejected + failing
        )

        async def reward(prompt: Prompt, sample: Sample) -> float:
            if prompt.row == poison or hash((prompt.epoch, prompt.row, 1)) % 100 < failing:
                raise ValueError("no reward")
            return float(sample.index)

        def keep(group: ScoredGroup) -> str | None:
            return "bad" if self.bad(group.prompt) else None

        self.functions: dict[str, Any] = {
            "reward": reward,
            "keep": keep,
            "lengths": lambda request: 1 + request.seed % 5 * tail,
        }
        self.before: RunState | None = None
        self.without_unfinished: set[Which] = set()

    def part(self, end_at: float | None) -> World:
        """Run from the last checkpoint until ``end_at``, and check what was trained since; the world of this part."""
        checkpoints = FakeCheckpoints(self.writing_s)
        quarantine = Quarantine(
            MOST_FAILURES, self.failed_rows.values(), lambda row: self.failed_rows.update({row.row: row})
        )
        world = World(**self.plan, **self.functions, checkpoints=checkpoints, before=self.before, quarantine=quarantine)
        now = run_virtually(_until(world, end_at))[1]
        for place, batch in enumerate(world.trainer.batches):
            assert batch.step == place + (self.before.step if self.before else 0)
        often = Counter(trained(world))
        assert set(often.values()) <= {1}
        assert not set(often) & self.without_unfinished, "trained twice"
        found = checkpoints.found(now)
        if found is not None:
            self._resume_from(stored(found), world)
        return world

    def _resume_from(self, state: RunState, world: World) -> None:
        done = taken(state, self.rows) - set(state.outstanding)
        assert len(state.outstanding) == len(set(state.outstanding))
        assert set(state.outstanding) <= taken(state, self.rows)
        assert self.without_unfinished <= done, "without_unfinished before, outstanding again"
        steps = [batch for batch in world.trainer.batches if batch.step < state.step]
        fresh = {which(group.prompt) for batch in steps for group in batch.groups}
        assert fresh == {prompt for prompt in done - self.without_unfinished if not self._is_bad(prompt)}, (
            "neither trained nor bad"
        )
        counts = state.groups
        assert counts.trained + counts.filtered + counts.failed + counts.quarantined == len(done)
        assert counts.trained == state.step * self.plan["groups_per_step"]
        self.before, self.without_unfinished = state, done

    def _is_bad(self, prompt: Which) -> bool:
        epoch, row = prompt
        return bool(self.bad(Prompt(row=row, epoch=epoch, text="", token_ids=(1,), label=None)))


async def _until(world: World, end_at: float | None) -> float:
    try:
        async with asyncio.timeout(end_at):
            await world.main()
    except TimeoutError:
        pass
    return asyncio.get_running_loop().time()


LIVES = 250
TOGETHER = 10
"""Lives in one example: hypothesis takes half a millisecond for each."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "steps": (1, 2, 3, 4, 5, 6),
    "groups_per_step": (1, 2, 3),
    "group_size": (1, 2),
    "staleness": (0, 1, 2, 3),
    "slots": (1, 3, 8),
    "stale": ("wait", "mask", "drop"),
    "partial": (False, True),
    "abort": (False, True),
    "train_seconds": (0.01, 0.3),
    "rows": (1, 3, 40),
    "rejected": (0, 20),
    "failing": (0, 5),
    "poison": (None, 1),  # a row that always fails, and so is left out after a while
    "tail": (1, 9),
    "save_interval": (1, 2, 3),
    "writing_s": (0.0, 0.1, 1.0),
    "ends": (0, 1, 2, 3),
}
"""Values of each field of a life; the first is the plainest."""
MOST_ENDS = 3
MOST_FAILURES = 4
"""Failures until a row is left out; the histories of other rows have no four failures in a row."""
LAST_END_S = 1.5
"""Latest time of an end, in seconds: later most lives are over."""
SIZE = len(CHOICES) + 2 * MOST_ENDS
"""Bytes that make a life: one for each choice, two for each end."""


@settings(
    max_examples=LIVES // TOGETHER + 1,  # the first is all zeros
    phases=(Phase.generate, Phase.shrink),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.binary(min_size=TOGETHER * SIZE, max_size=TOGETHER * SIZE))
def test_over_random_ends_every_prompt_is_finished_exactly_once(draws: bytes) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for each in batched(draws, SIZE):
            plan = drawn(CHOICES, bytes(each[: len(CHOICES)]))
            times = [LAST_END_S * int.from_bytes(pair) / 0xFFFF for pair in batched(each[len(CHOICES) :], 2)]
            with named(plan):
                live(plan, times[: plan.pop("ends")])
    finally:
        logging.disable(logging.NOTSET)


def live(plan: dict[str, Any], ends: list[float]) -> None:
    life = Life({**plan, "max_failed_groups": 30, "max_filtered_groups": 500, "chunk": 24})
    for end_at in ends:
        if life.before is None or life.before.step < plan["steps"]:
            life.part(end_at)
    if life.before is None or life.before.step < plan["steps"]:
        world = life.part(None)
        assert world.facts[-1].scheduler.groups.trained == plan["steps"] * plan["groups_per_step"]
    assert life.before is not None
    assert life.before.step == plan["steps"]
