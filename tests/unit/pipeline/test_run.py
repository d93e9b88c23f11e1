"""Weight updates during training: interrupted ones, those for restarted engines, and none at all."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.engines.fake import FakeTrainer
from asyncrl.metrics.reporter import Reporter
from asyncrl.pipeline.run import skipped
from asyncrl.types import Batch, TrainReport, Weights
from tests.unit.pipeline.harness import World
from tests.virtual_time import run_virtually


def test_training_continues_while_weights_are_sent() -> None:
    overlapped = World(steps=6, update_seconds=0.5, train_seconds=2.0, staleness=3, slots=64).run()
    waiting = World(
        steps=6, update_seconds=0.5, train_seconds=2.0, staleness=3, slots=64, trains_during_updates=False
    ).run()
    assert waiting.seconds - overlapped.seconds > 4.0  # five updates of a second; no step follows the last one
    assert [fact.update_wait_s for fact in overlapped.facts] == [0.0] * 6
    assert all(fact.update is not None and fact.update.total_s == 1.0 for fact in overlapped.facts)


def test_an_update_that_takes_longer_than_the_next_step_is_not_called_training() -> None:
    world = World(steps=5, update_seconds=2.0, train_seconds=1.0, staleness=3, slots=64).run()
    assert [fact.train_s for fact in world.facts] == [1.0] * 5
    late = [fact.late_update_s for fact in world.facts]
    assert late == pytest.approx([0.0, 3.0, 3.0, 3.0, 3.0], abs=0.02)  # an update takes 4 s, and a tick of the clock
    for fact in world.facts:
        assert fact.step_s == pytest.approx(fact.trainer_waited_s + fact.train_s + fact.late_update_s)


def test_a_step_is_reported_with_its_update_and_the_version_that_it_brought() -> None:
    world = World(steps=4, interval=2, update_seconds=0.3).run()
    assert [fact.update is not None for fact in world.facts] == [False, True, False, True]
    assert [fact.scheduler.weights.version for fact in world.facts] == [0, 1, 1, 2]
    assert [fact.batch.step for fact in world.facts] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("keeps_copies", "first"),
    [(True, Weights(version=2, step=1)), (False, Weights(version=2, step=2))],
    ids=["what was taken, while the trainer trains", "without a copy what the trainer has once it has trained"],
)
def test_an_interrupted_update_is_restarted(keeps_copies: bool, first: Weights) -> None:
    world = World(
        steps=4,
        staleness=3,
        slots=64,
        train_seconds=5.0,
        update_seconds=0.2,
        interrupted_updates=1,
        keeps_copies=keeps_copies,
    ).run()
    assert world.updater.published[0] == first
    assert world.facts[0].update is not None
    assert [weights.step for weights in world.updater.published][-1] == 4
    versions = [weights.version for weights in world.updater.published]
    assert versions == sorted(set(versions))
    assert len(world.facts) == 4
    assert max(world.lags) <= 3


def test_a_restarted_engine_gets_the_weights_that_the_trainer_has() -> None:
    world = World(steps=3, staleness=0, lengths=lambda request: 500, train_seconds=1.0, update_seconds=0.1)

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            running = both.create_task(world.main())
            await asyncio.sleep(3.0)  # no step is trained: the first answers take five seconds
            world.updater.rejoined.set()
            await asyncio.sleep(1.0)
            assert world.updater.published == [Weights(version=1, step=0)]
            await running

    run_virtually(main())
    assert [weights.step for weights in world.updater.published] == [0, 1, 2, 3]
    assert max(world.lags) == 0


def test_a_restarted_engine_gets_the_served_weights_between_two_updates() -> None:
    world = World(steps=4, interval=2, staleness=3, slots=64, train_seconds=10.0, update_seconds=0.1)

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            running = both.create_task(world.main())
            while len(world.facts) < 3:  # noqa: ASYNC110 -- on a virtual clock
                await asyncio.sleep(0.5)
            world.updater.rejoined.set()
            await running

    run_virtually(main())
    assert [weights.step for weights in world.updater.published] == [2, 2, 4]
    assert max(world.lags) <= 3


def test_a_restarted_engine_does_not_wait_for_a_training_step() -> None:
    world = World(steps=2, staleness=1, slots=64, train_seconds=10.0, update_seconds=0.1)

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            running = both.create_task(world.main())
            while not world.facts:  # noqa: ASYNC110 -- on a virtual clock
                await asyncio.sleep(0.5)
            world.updater.rejoined.set()
            await asyncio.sleep(1.0)
            assert world.updater.published == [Weights(version=1, step=1), Weights(version=2, step=1)]
            assert len(world.facts) == 1
            await running

    run_virtually(main())
    assert [weights.step for weights in world.updater.published] == [1, 1, 2]


class Untrained(FakeTrainer):
    """A trainer that takes batches and trains nothing, as ``NoTrainer`` does."""

    async def train(self, batch: Batch) -> TrainReport:
        self.batches.append(batch)
        return replace(skipped(0.0), is_skipped=False, has_trainer=False)


def test_without_a_trainer_batches_are_reported_and_weights_stay() -> None:
    world = World(steps=5, staleness=4, interval=None, make_trainer=Untrained, held_out=2, eval_interval=2).run()
    assert [facts.batch.step for facts in world.facts] == list(range(5))
    assert {facts.scheduler.weights for facts in world.facts} == {Weights(version=0, step=0)}
    assert all(facts.update is None and facts.logprob_diff is None for facts in world.facts)
    assert {facts.evaluation.weights.step for facts in world.facts if facts.evaluation} == {0}
    assert world.updater.published == []
    last = world.facts[-1].scheduler
    assert (last.groups.trained, last.groups.failed, last.groups.stale, last.tokens.held) == (20, 0, 0, 0)
    row = Reporter([]).row(world.facts[-1])
    assert [name for name in row if name.startswith(("train/", "mismatch/"))] == []
    assert row["lag/max"] == 4
