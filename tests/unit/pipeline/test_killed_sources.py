"""Runs on a user's data source that are killed and recover: no prompt is lost, and none is trained twice."""

import copy
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from asyncrl.buffer.journal import Admitted, Left, PromptPlace, Record, Snapshot
from asyncrl.compat import Sample
from asyncrl.compat.data_sources import SlimeSource
from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.hooks.native_source import NativeSource
from asyncrl.hooks.prompt_source import UserPrompts
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.pipeline.recovery import Recovery, recovery
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.protocols import UserSource
from asyncrl.types import GroupId, NewPrompt, Prompt
from tests.unit.hooks.callers import InlineCaller
from tests.unit.hooks.test_prompt_source import ARGS, Counting, Slimes, tokenise
from tests.unit.pipeline.harness import World
from tests.unit.pipeline.test_recovery import SlowJournal, until, write
from tests.virtual_time import run_virtually

STEPS = 8


class SavedSlimes(Slimes):
    """A source of slime's shape with a buffer, whose files outlive it."""

    def __init__(self, files: dict[int, Any]) -> None:
        super().__init__()
        self.files = files

    def save(self, rollout_id: int) -> None:
        self.files[rollout_id] = (self.number, [[copy.copy(each) for each in group] for group in self.buffer])

    def load(self, rollout_id: int) -> None:
        self.number, self.buffer = copy.deepcopy(self.files[rollout_id])


def counting(files: dict[int, Any]) -> UserSource:
    return NativeSource(Counting())


def slimes(files: dict[int, Any]) -> UserSource:
    return SlimeSource(SavedSlimes(files), ARGS)


class Life:
    """A run that is killed, and starts again with a new object of the source."""

    def __init__(self, folder: Path, plan: dict[str, Any], make: Callable[[dict[int, Any]], UserSource]) -> None:
        self.folder, self.plan, self.make = folder, plan, make
        self.files: dict[int, Any] = {}
        self.checkpoint: RunState | None = None
        self.recovered: Recovery | None = None
        self.num_parts = 0
        self.trained: dict[int, list[str]] = {}
        """The prompts of each step, as it was trained last."""

    def part(self, kill_at: float | None, torn: float = 0.0) -> tuple[World, UserPrompts]:
        """Run until ``kill_at``, and read checkpoint and journal as the next start does."""
        source = UserPrompts(
            self.make(self.files), tokenise, name="mine", ahead=6, worker=InlineCaller(), timeout_s=60.0
        )
        if self.checkpoint is not None and self.checkpoint.source is not None:
            source.restore(self.checkpoint.step, **self.checkpoint.source)
        if self.recovered is not None:
            source.leave_out(self.recovered.given, self.recovered.next_row)
        journal, checkpoints = SlowJournal(), FakeCheckpoints(0.1)
        world = World(
            steps=STEPS,
            save_interval=3,
            **self.plan,
            checkpoints=checkpoints,
            recovery=self.recovered,
            journal=journal,
            source=source,
        )
        now = run_virtually(until(world, kill_at))[1]
        for batch in world.trainer.batches:
            self.trained[batch.step] = [group.prompt.text for group in batch.groups]
        if (found := checkpoints.found(now)) is not None:
            self.checkpoint = RunState.from_json(orjson.loads(orjson.dumps(found)))
        self.num_parts += 1
        delivered = world.scheduler.num_delivered if hasattr(world, "scheduler") else 0
        write(self.folder, self.num_parts, journal.written(now, torn), delivered)
        again = recovery(self.folder, self.checkpoint, {}, source.at, num_steps=STEPS, takes_back=source.takes_back)
        assert not isinstance(again, str), again
        self.recovered = again
        return world, source

    def held(self, world: World, source: UserPrompts) -> list[str]:
        """The prompts that were given and not trained."""
        scheduler = world.scheduler
        prompts = [group.prompt for group in (*scheduler._in_flight, *scheduler._parked)]  # noqa: SLF001
        prompts += [group.prompt for group in scheduler._buffer.groups().values()]  # noqa: SLF001
        prompts += [*scheduler._prompt_queue.returned, *source._ahead]  # noqa: SLF001
        prompts += [told.prompt for told in source._ended if told.outcome == "stale"]  # noqa: SLF001
        texts = [prompt.text for prompt in prompts]
        if isinstance(slime := getattr(source._source, "_source", None), Slimes):  # noqa: SLF001
            texts += [str(group[0].prompt) for group in slime.buffer]
        return texts


PLANS: tuple[dict[str, Any], ...] = ({}, {"stale": "drop"}, {"partial": True}, {"staleness": 3}, {"staleness": 0})


@pytest.mark.parametrize("make", [counting, slimes])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seed", range(4))
def test_every_prompt_is_trained_once_or_still_there(
    tmp_path: Path, seed: int, plan: dict[str, Any], make: Callable[[dict[int, Any]], UserSource]
) -> None:
    rng = random.Random(seed)
    life = Life(tmp_path, {"lengths": lambda request: 5 + request.seed % 300, **plan}, make)
    for _ in range(rng.randint(1, 3)):
        life.part(rng.uniform(0.2, 9.0), rng.random())
    world, source = life.part(None)
    assert sorted(life.trained) == list(range(STEPS))
    texts = Counter([*itertools.chain.from_iterable(life.trained.values()), *life.held(world, source)])
    assert max(texts.values()) == 1
    assert {int(text) for text in texts} == set(range(len(texts)))
    rows = [group.prompt.row for batch in world.trainer.batches for group in batch.groups]
    assert len(rows) == len(set(rows))


class Stream:
    """A source that continues where it was, whatever state it is given: a queue of another service, for instance."""

    def __init__(self, numbers: "itertools.count[int]") -> None:
        self.numbers = numbers

    def take(self) -> NewPrompt:
        return NewPrompt(prompt=str(next(self.numbers)))


def test_a_source_that_does_not_repeat_itself_trains_all_that_it_gives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = itertools.count()
    life = Life(
        tmp_path, {"lengths": lambda request: 5 + request.seed % 300}, lambda files: NativeSource(Stream(numbers))
    )
    with caplog.at_level(logging.WARNING):
        life.part(4.0)
        life.part(None)
    trained = list(itertools.chain.from_iterable(life.trained.values()))
    assert len(trained) == len(set(trained)) == STEPS * 4
    assert sum("gives other prompts than before the kill" in line for line in caplog.messages) == 1


def test_the_samples_of_slime_are_as_they_were() -> None:
    files: dict[int, Any] = {}
    source = SavedSlimes(files)
    source.add_samples([[Sample(prompt="a")]])
    source.save(3)
    other = SavedSlimes(files)
    other.load(3)
    assert [group[0].prompt for group in other.get_samples(2)] == ["a", "0"]


@pytest.mark.parametrize(("takes_back", "again", "given"), [(True, [], ["a", "b"]), (False, [0], ["a", "b", "a"])])
def test_a_prompt_that_the_source_took_back_and_gave_again_counts_once(
    tmp_path: Path, takes_back: bool, again: list[int], given: list[str]
) -> None:
    """The group of row 0 was stale, and row 2 has the same text: the same prompt only if the source took it back."""

    def admitted(row: int, text: str) -> Admitted:
        prompt = Prompt(row=row, epoch=0, text=text, token_ids=(1,), label=None)
        place = PromptPlace(epoch=0, row=row, prompt=prompt)
        return Admitted(group_id=GroupId(row), place=place, prompts_taken=row + 1, last_taken=(0, row))

    empty = RunState(
        step=0,
        version=0,
        next_id=0,
        prompts_taken=0,
        outstanding=(),
        tokens=TokenCounts(),
        groups=GroupCounts(),
        reasons={},
        verdicts=(),
        retries=0,
        aborts=0,
    )
    state = {**empty.as_json(), "about": {}}
    left = Left(group_id=GroupId(0), outcome="stale", num_tokens=5, returns_prompt=True)
    records: list[Record] = [Snapshot(step=0, state=orjson.loads(orjson.dumps(state)), held=())]
    records += [admitted(0, "a"), admitted(1, "b"), left, admitted(2, "a")]
    write(tmp_path, 1, [*records], 5)
    found = recovery(
        tmp_path, None, {}, lambda epoch, row: pytest.fail("looked up"), num_steps=9, takes_back=takes_back
    )
    assert isinstance(found, Recovery)
    assert [each.prompt.text for each in found.restored.in_flight] == ["b", "a"]
    assert [prompt.row for prompt in found.again] == again
    assert [prompt.text for prompt in found.given] == given
    assert found.next_row == 3
