"""Batches whose loss is not finite are skipped, a few in a row, and a resumed run gets past them."""

import logging
from collections.abc import Sequence

import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import NonFiniteLoss
from asyncrl.metrics.facts import TokenCounts
from asyncrl.metrics.reporter import row
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import Batch
from tests.unit.pipeline.harness import World


def steps(*which: int) -> "World":
    """A run of ten steps, in which the loss of some is not finite."""
    return World(steps=10, groups_per_step=2, spoils=lambda batch: batch.step in which, skips=1)


def trained(world: World) -> Sequence[int]:
    return [batch.step for batch in world.trainer.batches]


def test_a_bad_batch_is_skipped_and_its_groups_have_failed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        world = steps(4).run()
    assert trained(world) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    counts, tokens = world.facts[-1].scheduler.groups, world.facts[-1].scheduler.tokens
    assert (counts.trained, counts.failed) == (18, 2)
    assert tokens.failed == 2 * 2 * 8
    (line,) = (record.getMessage() for record in caplog.records if "is skipped" in record.getMessage())
    assert line == (
        "step 4 is skipped, its 2 groups count as failed: policy: loss nan in step 4 (skip-nonfinite-steps: 1 of 1 in "
        "a row)"
    )
    assert [weights.step for weights in world.updater.published] == list(range(1, 11)), "updates keep their rhythm"


def test_the_row_of_a_skipped_step_has_no_numbers_of_training() -> None:
    rows = [row(facts, TokenCounts()) for facts in steps(4).run().facts]
    assert [each["train/skipped"] for each in rows] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [name for name in rows[4] if name.startswith(("train/", "mismatch/"))] == ["train/skipped"]
    assert "train/loss" in rows[5]


def test_bad_batches_in_a_row_end_the_run() -> None:
    world = steps(4, 5)
    with pytest.raises(NonFiniteLoss, match="step 5"):
        world.run()
    assert trained(steps(3, 5, 7).run()) == [0, 1, 2, 4, 6, 8, 9], "others between them reset the count"


def test_a_bad_first_step_ends_the_run() -> None:
    with pytest.raises(NonFiniteLoss, match="step 0"):
        steps(0).run()


def test_by_request_every_bad_batch_ends_the_run() -> None:
    world = steps(4)
    world.skips = 0
    with pytest.raises(NonFiniteLoss, match="step 4"):
        world.run()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_resumed_run_gets_past_a_bad_batch(staleness: int) -> None:
    """Without staleness the batch of a step is the same after each resume, and so is its loss."""

    def spoils(batch: Batch) -> bool:
        return sum(sum(each.sample.token_ids) for group in batch.groups for each in group.samples) % 13 == 3

    before = None
    for _ in range(10):
        checkpoints = FakeCheckpoints(0.0)
        world = World(
            steps=40,
            groups_per_step=4,
            staleness=staleness,
            save_interval=2,
            checkpoints=checkpoints,
            before=before,
            lengths=lambda request: 3 + request.seed % 20,
            spoils=spoils,
            skips=2,
        )
        try:
            world.run()
            break
        except NonFiniteLoss:
            before = RunState.from_json(orjson.loads(orjson.dumps(checkpoints.found(1e9))))
    assert world.facts[-1].batch.step == 39
    assert world.facts[-1].scheduler.groups.failed > 0
