"""Failed checkpoints: training continues, until several in a row or the last one fail."""

from pathlib import Path

import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import CheckpointFailed
from tests.unit.pipeline.harness import World


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message for record in caplog.records if "checkpoint" in record.message and record.levelname != "INFO"
    ]


def test_a_failed_checkpoint_is_a_warning_and_the_next_interval_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = FakeCheckpoints(0.5, failing={2, 4, 8})
    world = World(steps=10, save_interval=2, checkpoints=checkpoints).run()
    assert len(world.facts) == 10
    assert sorted(checkpoints.written) == [6, 10]
    assert [text.split(";")[0] for text in warnings(caplog)] == [
        f"the checkpoint of step {step} failed" for step in (2, 4, 8)
    ]
    assert ["row: 1," in text for text in warnings(caplog)] == [True, False, True]
    assert warnings(caplog)[0].endswith("max-failed-saves 3): iter_0000002: No space left on device")


def test_a_failure_is_noticed_before_the_next_step_and_delays_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def seconds(failing: set[int]) -> float:
        checkpoints = FakeCheckpoints(1.5, failing=failing)
        return World(steps=8, train_seconds=1.0, save_interval=4, checkpoints=checkpoints).run().seconds

    assert seconds({4}) == pytest.approx(seconds(set()))
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize(("most", "failing"), [(3, {2, 4, 6}), (1, {4})])
def test_several_failures_in_a_row_end_the_run(most: int, failing: set[int]) -> None:
    checkpoints = FakeCheckpoints(0.5, failing=failing)
    world = World(steps=20, save_interval=2, checkpoints=checkpoints, max_failed_saves=most)
    with pytest.raises(
        CheckpointFailed, match=rf"^{most} checkpoints in a row failed \(max-failed-saves\); the last: "
    ):
        world.run()
    assert len(world.facts) < 10


@pytest.mark.parametrize("seconds", [0.5, 0.0])
def test_a_failed_last_checkpoint_is_an_error_and_the_model_is_saved(seconds: float) -> None:
    world = World(steps=6, save_interval=2, checkpoints=FakeCheckpoints(seconds, failing={6}))
    with pytest.raises(CheckpointFailed, match="iter_0000006"):
        world.run()
    assert world.trainer.saved == [Path("model")]


def test_a_checkpoint_that_cannot_begin_is_a_warning_unless_it_is_the_last(caplog: pytest.LogCaptureFixture) -> None:
    class CannotBegin(FakeCheckpoints):
        async def begin(self, step: int, run: object) -> None:
            raise CheckpointFailed(f"iter_{step:07} cannot be written: Read-only file system")

    world = World(steps=4, save_interval=2, checkpoints=CannotBegin())
    with pytest.raises(CheckpointFailed, match=r"^iter_0000004 cannot be written"):
        world.run()
    assert len(world.trainer.batches) == 4
    assert world.trainer.saved == [Path("model")]
    assert len(warnings(caplog)) == 1
