"""A trainer that dies at any moment starts again within the run, which loses and repeats nothing."""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.buffer.journal import RecordedSteps
from asyncrl.buffer.journal.recovery import replay_from
from asyncrl.engines.fake import FakeCheckpoints, FakeTrainer
from asyncrl.errors import HookFailed, TrainerFailed, TrainerOutOfMemory
from asyncrl.types import Batch, TrainReport
from tests.unit.pipeline.harness import World, drawn, named
from tests.unit.pipeline.test_recovery import SlowJournal, content, write
from tests.virtual_time import lengths_in_rotation


@contextmanager
def as_in_a_thread() -> Iterator[None]:
    """Allow reads and writes of files, which a run does in a thread, and which take no time on the virtual clock."""
    loop = asyncio.get_running_loop()
    asyncio.events._set_running_loop(None)  # noqa: SLF001 (what blockbuster looks at)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(loop)  # noqa: SLF001


class Recorded(RecordedSteps):
    """Batches that are decoded on the event loop."""

    async def batch(self, step: int) -> Batch:
        """See ``RecordedSteps.batch``."""
        return self._replay.batch(step)


class ReadableJournal(SlowJournal):
    """A journal that the run itself can read."""

    async def steps_since(self, step: int) -> RecordedSteps | None:
        """See ``Journal.steps_since``."""
        await self.durable(len(self.items))
        with as_in_a_thread(), tempfile.TemporaryDirectory() as folder:
            write(Path(folder), 1, [item for _, item in self.items], self.delivered)
            replay = replay_from(Path(folder), step)
            return None if replay is None else Recorded(replay)


class Deaths:
    """Kills the trainer of a world at some moments, each of which counts from the start or from the last restart."""

    def __init__(self, moments: Sequence[float]) -> None:
        self.moments = moments
        self.world: World | None = None
        self.num_deaths = 0

    async def __call__(self) -> None:
        """Run beneath the training."""
        assert self.world is not None
        for moment in self.moments:
            await asyncio.sleep(moment)
            trainer = self.world.trainer
            trainer.died.set()
            self.num_deaths += 1
            while trainer.died.is_set():  # noqa: ASYNC110 (the virtual clock makes it exact)
                await asyncio.sleep(0.01)
        await asyncio.Event().wait()


def world(*moments: float, **plan: Any) -> World:
    """A world whose trainer dies at these moments."""
    deaths = Deaths(moments)
    chosen: dict[str, Any] = {
        "steps": 6,
        "staleness": 2,
        "save_interval": 2,
        "lengths": lengths_in_rotation((3, 9, 20)),
        "journal": ReadableJournal(),
        "max_trainer_restarts": 3,
        **plan,
    }
    if "checkpoints" not in plan:
        chosen["checkpoints"] = FakeCheckpoints(0.3)
    made = World(**chosen, beneath=deaths)
    deaths.world = made
    return made


def check(ended: World) -> None:
    """Check what holds for every run whose trainer died and came back."""
    steps = range(ended.steps)
    assert [batch.step for batch in ended.trainer.behind_weights] == list(steps), "each step is in the weights once"
    assert [facts.batch.step for facts in ended.facts] == list(steps), "one row per step"
    first = {batch.step: batch for batch in reversed(ended.trainer.batches)}
    for batch in ended.trainer.behind_weights:
        assert content(batch) == content(first[batch.step]), "the batch of the journal is the one that was trained"
    assert all(0 <= lag <= ended.staleness for lag in ended.lags)
    versions = [weights.version for weights in ended.updater.published]
    assert versions == sorted(set(versions)), "no version twice"
    trained = [weights.step for weights in ended.updater.published]
    assert trained == sorted(trained)
    asked = [request.request_id for request in ended.engine.requests]
    assert len(asked) == len(set(asked)), "no request again"
    last = ended.facts[-1].scheduler
    assert (last.tokens.lost, last.retries, last.aborts) == (0, 0, 0)
    groups = last.groups
    assert groups.admitted == groups.trained + groups.filtered + groups.stale + groups.failed + groups.buffered + (
        groups.in_flight + groups.partial + groups.training
    )
    checkpoints = ended.checkpoints
    assert checkpoints is not None
    assert max(checkpoints.written) == ended.steps, "the last checkpoint is there"
    assert ended.trainer.saved == [Path("model")]


@pytest.mark.parametrize(
    ("moment", "name"),
    [(0.02, "idle"), (0.8, "the first step"), (1.15, "an update"), (2.3, "a checkpoint"), (4.5, "a later step")],
)
def test_a_dead_trainer_comes_back_and_the_run_trains_what_it_would_have_trained(moment: float, name: str) -> None:
    straight = world(staleness=0).run()
    ended = world(moment, staleness=0).run()
    check(ended)
    one, other = straight.trainer.behind_weights, ended.trainer.behind_weights
    assert [content(batch) for batch in one] == [content(batch) for batch in other], name
    assert straight.facts[-1].scheduler.tokens == ended.facts[-1].scheduler.tokens
    assert ended.facts[-1].num_trainer_restarts == 1
    assert (ended.facts[-1].without_trainer_s or 0.0) > 2.9
    assert straight.facts[-1].num_trainer_restarts == straight.facts[-1].without_trainer_s == 0


def test_engines_generate_while_the_trainer_is_away() -> None:
    ended = world(5.0, lengths=lambda request: 150).run()
    check(ended)
    assert ended.trainer_processes is not None
    assert ended.trainer_processes.restored == [2]
    assert ended.updater.num_restarted == 1
    # Three batches of lookahead are generated by the time the trainer is back, so that no step waits for a batch.
    after = [facts.trainer_waited_s for facts in ended.facts if facts.without_trainer_s]
    assert max(after[:2]) < 0.2


def test_a_trainer_that_dies_before_the_first_checkpoint_begins_with_the_first_weights() -> None:
    ended = world(3.5, save_interval=None).run()
    check(ended)
    assert ended.trainer_processes is not None
    assert ended.trainer_processes.restored == [0]
    assert [batch.step for batch in ended.trainer.batches] == [0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_a_failed_restart_counts_and_is_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ended = world(3.2, failed_restarts=2).run()
    check(ended)
    assert (ended.facts[-1].without_trainer_s or 0.0) > 3 * 3.0 + 10.0 + 19.9
    said = [record.getMessage() for record in caplog.records if "trainer" in record.getMessage()]
    assert sum("attempt" in line for line in said) == 3
    assert any(line.startswith("trainer restarted: 0 steps trained again in ") for line in said)


def test_a_long_restart_is_no_standstill() -> None:
    ended = world(1.15, staleness=0, failed_restarts=3, max_trainer_restarts=4, watchdog_s=20.0).run()
    check(ended)
    assert (ended.facts[-1].without_trainer_s or 0.0) > 60.0


def test_more_failed_restarts_than_allowed_end_the_run() -> None:
    with pytest.raises(TrainerFailed, match=r"restarts since the last completed step: 3 \(max-trainer-restarts\)"):
        world(2.5, failed_restarts=3).run()


def test_completed_steps_allow_further_restarts() -> None:
    ended = world(1.5, 2.5, 2.5, 2.5, max_trainer_restarts=1, steps=10).run()
    check(ended)
    assert ended.facts[-1].num_trainer_restarts == 4


def test_without_restarts_the_run_ends_with_the_trainer() -> None:
    with pytest.raises(TrainerFailed, match="trainer rank 0, train: it died"):
        world(2.5, max_trainer_restarts=0).run()


class Raising(FakeTrainer):
    """A trainer whose code raises in step 2, and which lives on."""

    async def train(self, batch: Batch) -> TrainReport:
        """Raise in step 2."""
        if batch.step == 2:
            raise TrainerFailed("trainer rank 0, train: ValueError: in the user's loss")
        return await super().train(batch)


def test_an_error_that_a_living_rank_reports_ends_the_run() -> None:
    ending = world(make_trainer=Raising)
    with pytest.raises(TrainerFailed, match="in the user's loss"):
        ending.run()
    assert ending.trainer_processes is not None
    assert ending.trainer_processes.restored == []


class Hungry(FakeTrainer):
    """A trainer whose step 2 runs out of memory ``num_shortages`` times."""

    num_shortages = 2

    async def train(self, batch: Batch) -> TrainReport:
        """Raise in step 2."""
        if batch.step == 2 and self.num_shortages:
            self.num_shortages -= 1
            raise TrainerOutOfMemory("trainer rank 0, train: OutOfMemoryError: 20 GiB")
        return await super().train(batch)


def test_a_step_that_ran_out_of_memory_is_trained_after_a_start_with_less(caplog: pytest.LogCaptureFixture) -> None:
    ended = world(make_trainer=Hungry, savings=["recompute-granularity full", "max-tokens-per-gpu 4096"])
    with caplog.at_level(logging.WARNING):
        ended.run()
    check(ended)
    assert ended.trainer_processes is not None
    assert ended.trainer_processes.restored == [0, 0]
    said = [record.getMessage() for record in caplog.records if "these flags" in record.getMessage()]
    assert said == [
        f"the trainer ran out of memory and starts again with {flags}; give later runs these flags"
        for flags in ("recompute-granularity full", "max-tokens-per-gpu 4096")
    ]


@pytest.mark.parametrize(("savings", "most"), [(["recompute-granularity full"], 3), (["one", "two"], 0)])
def test_memory_that_cannot_be_saved_or_must_not_be_ends_the_run(savings: list[str], most: int) -> None:
    ending = world(make_trainer=Hungry, savings=savings, max_trainer_restarts=most)
    with pytest.raises(TrainerOutOfMemory, match="20 GiB"):
        ending.run()


class HungryAgain(FakeTrainer):
    """A trainer that runs out of memory once when it trains step 1 again."""

    is_full = False

    async def train(self, batch: Batch) -> TrainReport:
        """Raise in step 1."""
        if batch.step == 1 and any(each.step == 1 for each in self.batches) and not self.is_full:
            self.is_full = True
            raise TrainerOutOfMemory("trainer rank 0, train: OutOfMemoryError: 20 GiB")
        return await super().train(batch)


def test_a_step_that_runs_out_of_memory_when_it_is_trained_again() -> None:
    ended = world(3.5, make_trainer=HungryAgain, savings=["recompute-granularity full"], save_interval=None).run()
    check(ended)
    assert ended.trainer_processes is not None
    assert ended.trainer_processes.restored == [0, 0]
    with pytest.raises(TrainerOutOfMemory):
        world(3.5, make_trainer=HungryAgain, save_interval=None).run()


class SpoiltHooks:
    """Hooks that fail when they are called again."""

    def finished(self, *_: Any) -> None:
        """See ``GroupObserver.finished``."""

    def returned(self, *_: Any) -> bool:
        """See ``GroupObserver.returned``."""
        return False

    async def prepared(self, batch: Batch) -> Batch:
        """Change nothing."""
        return batch

    async def prepared_again(self, batch: Batch) -> Batch:
        """Fail."""
        raise HookFailed(f"step {batch.step}: not again")


def test_an_error_while_steps_are_trained_again_ends_the_run_if_the_ranks_live() -> None:
    with pytest.raises(HookFailed, match="not again"):
        world(3.5, hooks=SpoiltHooks(), save_interval=None).run()


def test_without_the_batches_the_run_ends_with_a_reason() -> None:
    with pytest.raises(TrainerFailed, match="the journal is off or begins after step 0"):
        world(3.5, journal=None, save_interval=None).run()


def test_a_skipped_step_is_not_trained_again() -> None:
    spoilt: Callable[[Batch], bool] = lambda batch: batch.step == 2  # noqa: E731
    ended = world(4.5, spoils=spoilt, skips=1, save_interval=None).run()
    assert [batch.step for batch in ended.trainer.behind_weights] == [0, 1, 3, 4, 5]
    assert ended.facts[-1].num_trainer_restarts == 1


CHOICES: dict[str, tuple[Any, ...]] = {
    "staleness": (1, 0, 3),
    "interval": (1, 2),
    "save_interval": (2, 1, 3, None),
    "trains_during_updates": (True, False),
    "update_seconds": (0.1, 0.7),
    "seconds_per_token": (0.01, 0.05),
    "writing_s": (0.3, 0.05, 1.7),
    "failed_restarts": (0, 1),
    "interrupted_updates": (0, 1),
}


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
@given(
    draws=st.binary(min_size=len(CHOICES), max_size=len(CHOICES)),
    moments=st.lists(st.floats(0.01, 6.0), min_size=1, max_size=3),
)
def test_random_deaths_lose_and_repeat_nothing(draws: bytes, moments: list[float]) -> None:
    plan = drawn(CHOICES, draws)
    with named({**plan, "moments": moments}):
        writing_s = plan.pop("writing_s")
        plan["interval"] = min(plan["interval"], plan["staleness"] + 1)
        ended = world(*moments, **plan, checkpoints=FakeCheckpoints(writing_s), max_trainer_restarts=9).run()
        check(ended)
