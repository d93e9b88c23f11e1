"""A run that is asked to end early writes a checkpoint of all its steps, and ends."""

import logging
from collections import Counter
from typing import Any

import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.pipeline.scheduling.run_state import RunState
from tests.unit.pipeline.harness import World
from tests.virtual_time import lengths_in_rotation

PLAN: dict[str, Any] = {"steps": 30, "lengths": lengths_in_rotation((5, 40, 300)), "seconds_per_token": 0.02}


def rows(world: World) -> list[tuple[int, int]]:
    return [(group.prompt.epoch, group.prompt.row) for batch in world.trainer.batches for group in batch.groups]


@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("asked_s", [9.0 + 0.37 * number for number in range(12)])
def test_whenever_it_is_asked_nothing_is_lost_or_repeated(asked_s: float, colocate: bool) -> None:
    plan = PLAN | {"colocate": colocate, "staleness": 0 if colocate else 2}
    first = World(**plan, checkpoints=FakeCheckpoints(), ends_early_s=asked_s).run()
    assert first.checkpoints is not None
    (step,) = first.checkpoints.written
    assert step == len(first.trainer.batches) < 30, "the step in training is finished, and none after it"
    assert first.early_end.saved_step == step
    assert first.facts[-1].batch.step == step - 1, "its row is written too"
    before = RunState.from_json(orjson.loads(orjson.dumps(first.checkpoints.written[step])))
    second = World(**plan, before=before, checkpoints=FakeCheckpoints()).run()
    counts = Counter(rows(first) + rows(second))
    assert len(first.trainer.batches) + len(second.trainer.batches) == 30
    assert max(counts.values()) == 1
    groups = second.facts[-1].scheduler.groups
    assert groups.trained == len(counts)


def test_a_run_that_has_trained_no_step_has_saved_nothing() -> None:
    first = World(**PLAN, checkpoints=FakeCheckpoints(), ends_early_s=12.0).run()
    assert first.checkpoints is not None
    (step,) = first.checkpoints.written
    before = RunState.from_json(orjson.loads(orjson.dumps(first.checkpoints.written[step])))
    second = World(**PLAN, before=before, checkpoints=FakeCheckpoints(), ends_early_s=0.1).run()
    assert second.trainer.batches == []
    assert second.early_end.saved_step is None


def test_the_last_save_is_announced_once_all_steps_are_reported() -> None:
    assert World(**PLAN, checkpoints=FakeCheckpoints()).run().last_saves == [(30, 30, 0)]
    assert World(**PLAN, checkpoints=FakeCheckpoints(), ends_early_s=12.0).run().last_saves == []


def test_a_run_that_waits_for_a_batch_does_not_wait_any_longer() -> None:
    world = World(steps=4, lengths=lambda request: 10_000, seconds_per_token=1.0, watchdog_s=1e6)
    world.checkpoints, world.ends_early_s = FakeCheckpoints(), 50.0
    world.run()
    assert world.seconds == pytest.approx(50.0, abs=1.0)
    assert world.checkpoints.written == {}, "no step was trained, so there is nothing to save"


def test_a_step_that_was_saved_is_not_saved_again() -> None:
    checkpoints = FakeCheckpoints(seconds=5.0)
    world = World(steps=30, save_interval=1, checkpoints=checkpoints, ends_early_s=3.0).run()
    assert sorted(checkpoints.written) == list(range(1, len(world.trainer.batches) + 1)), "the last one is complete"


def test_without_checkpoints_there_is_no_early_end() -> None:
    world = World(steps=4, ends_early_s=1.0).run()
    assert len(world.trainer.batches) == 4
    assert not world.early_end.is_asked


def test_an_evaluation_is_cut_off() -> None:
    world = World(steps=30, held_out=400, slots=2, eval_interval=1, lengths=lambda request: 200)
    world.checkpoints, world.ends_early_s = FakeCheckpoints(), 150.0
    world.run()
    assert world.seconds < 160.0
    assert len(world.trainer.batches) == 1, "the batch that waited for the evaluation"
    assert sorted(world.checkpoints.written) == [1]


def test_an_evaluation_that_has_finished_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """No step follows that could report it."""
    caplog.set_level(logging.INFO, logger="asyncrl.pipeline.run")
    world = World(steps=4, held_out=4, eval_interval=1, seconds_per_token=1.0, watchdog_s=1e6)
    world.lengths = lambda request: 8 if request.request_id.startswith("eval-") else 10_000
    world.checkpoints, world.ends_early_s = FakeCheckpoints(), 50.0
    world.run()
    assert world.trainer.batches == []
    assert "version 0 on held-out prompts" in caplog.text


def test_an_evaluation_before_the_last_step_is_cut_off() -> None:
    """The step before the last waits for a running pass."""
    world = World(steps=3, held_out=40, slots=2, eval_interval=1, lengths=lambda request: 200)
    world.checkpoints, world.ends_early_s = FakeCheckpoints(), 120.0
    world.run()
    assert world.seconds < 130.0
    assert sorted(world.checkpoints.written) == [2]


def test_a_checkpoint_follows_the_step_in_which_the_time_has_passed() -> None:
    checkpoints = FakeCheckpoints()
    World(steps=9, train_seconds=10.0, save_interval_s=25.0, checkpoints=checkpoints).run()
    assert sorted(checkpoints.written) == [3, 6, 9]
    both = FakeCheckpoints()
    World(steps=9, train_seconds=10.0, save_interval_s=25.0, save_interval=4, checkpoints=both).run()
    assert sorted(both.written) == [3, 4, 7, 8, 9], "a checkpoint of the other kind restarts the time"
