"""When no further group can come, the steps that were trained are saved before the run ends with the error."""

import asyncio
from typing import Any

import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import AsyncRLError, CheckpointFailed, FailureBudgetSpent, FilterBudgetSpent, Stalled
from asyncrl.event_loop import loop_time
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import Prompt, Sample, ScoredGroup
from tests.unit.pipeline.harness import token_sum
from tests.unit.pipeline.test_outages import STEPS, away, busy

FROM_S = 20.0
"""Seconds after which something fails for good."""


def too_easy(group: ScoredGroup) -> str | None:
    return "too easy" if loop_time() > FROM_S else None


async def hung(prompt: Prompt, sample: Sample) -> float:
    if loop_time() > FROM_S:
        await asyncio.Event().wait()
    return await token_sum(prompt, sample)


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (FailureBudgetSpent, {"reward": away(FROM_S, 1e9, ValueError)}),
        (FilterBudgetSpent, {"keep": too_easy}),
        (Stalled, {"reward": hung, "watchdog_s": 30.0}),
    ],
)
def test_the_trained_steps_are_saved_and_the_run_resumes_behind_them(
    error: type[AsyncRLError], changes: dict[str, Any]
) -> None:
    checkpoints = FakeCheckpoints(0.1)
    world = busy(checkpoints=checkpoints, save_interval=1000, **changes)
    with pytest.raises(error):
        world.run()
    step = len(world.trainer.batches)
    assert 0 < step < STEPS
    assert list(checkpoints.written) == [step], "the state after the last trained step"
    before = RunState.from_json(orjson.loads(orjson.dumps(checkpoints.written[step])))
    resumed = busy(before=before).run()
    assert [batch.step for batch in resumed.trainer.batches] == list(range(step, STEPS))
    prompts = [group.prompt.row for run in (world, resumed) for batch in run.trainer.batches for group in batch.groups]
    assert len(set(prompts)) == len(prompts), "a prompt was trained twice"


class Broken(FakeCheckpoints):
    """No checkpoint can be written."""

    async def begin(self, *args: Any, **named: Any) -> Any:
        raise CheckpointFailed("no space left")


def test_a_checkpoint_that_fails_does_not_hide_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    world = busy(checkpoints=Broken(0.1), save_interval=1000, keep=too_easy)
    with pytest.raises(FilterBudgetSpent):
        world.run()
    assert "FilterBudgetSpent: the steps since the last checkpoint are lost: no space left" in caplog.text


def test_a_step_in_training_is_finished_first() -> None:
    """The failures come while one long step trains."""
    checkpoints = FakeCheckpoints(0.1)
    world = busy(reward=away(FROM_S, 1e9, ValueError), train_seconds=300.0, checkpoints=checkpoints, save_interval=1000)
    with pytest.raises(FailureBudgetSpent):
        world.run()
    assert world.trainer.batches
    assert list(checkpoints.written) == [len(world.trainer.batches)]
