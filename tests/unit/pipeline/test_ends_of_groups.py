"""When no further group can come, the steps that were trained are saved before the run ends with the error."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import AsyncRLError, CheckpointFailed, FailureBudgetSpent, FilterBudgetSpent, RewardOutage, Stalled
from asyncrl.event_loop import loop_time
from asyncrl.outages import Holds
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.pipeline.scheduling.watchdog import Watchdog
from asyncrl.types import Prompt, Sample, ScoredGroup
from tests.unit.pipeline.harness import token_sum
from tests.unit.pipeline.test_outages import STEPS, away, busy
from tests.virtual_time import run_virtually

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
    assert "FilterBudgetSpent: the steps since the last checkpoint may be lost: no space left" in caplog.text


def test_a_step_in_training_is_finished_first() -> None:
    """The failures come while one long step trains."""
    checkpoints = FakeCheckpoints(0.1)
    world = busy(reward=away(FROM_S, 1e9, ValueError), train_seconds=300.0, checkpoints=checkpoints, save_interval=1000)
    with pytest.raises(FailureBudgetSpent):
        world.run()
    assert world.trainer.batches
    assert list(checkpoints.written) == [len(world.trainer.batches)]


def test_the_last_step_is_reported_before_the_end() -> None:
    """Its weight update is still under way when the failures end the run."""
    world = busy(reward=away(FROM_S, 1e9, ValueError), update_seconds=60.0, train_seconds=1.0)
    with pytest.raises(FailureBudgetSpent):
        world.run()
    assert [facts.batch.step for facts in world.facts] == [batch.step for batch in world.trainer.batches]


class Away:
    """A hold of admission by an outage that has begun."""

    reason = "the service is away"
    since = 0.0
    outage_s = 0.0

    def notify(self, changed: Callable[[], None]) -> None:
        """Never."""


def test_an_outage_still_ends_a_wait_for_an_evaluation_once_no_group_can_come() -> None:
    async def waited() -> float:
        watchdog = Watchdog(
            Budgets(max_failed_groups=1, max_filtered_groups=1, watchdog_timeout_s=50.0, reward_outage_s=300.0),
            Away(),
            lambda: "",
        )
        watchdog.end(FilterBudgetSpent("none are left"))
        with pytest.raises(RewardOutage):
            await watchdog.wait(asyncio.Event(), allows_silence=True)
        with pytest.raises(FilterBudgetSpent):
            await watchdog.wait(asyncio.Event())
        return loop_time()

    assert run_virtually(waited())[0] == pytest.approx(300.0, abs=1.0)


def test_a_wait_without_a_limit_ends_with_the_groups() -> None:
    async def waited() -> None:
        watchdog = Watchdog(
            Budgets(max_failed_groups=1, max_filtered_groups=1, watchdog_timeout_s=math.inf), Holds(()), lambda: ""
        )
        waiting = asyncio.get_running_loop().create_task(watchdog.wait(asyncio.Event()))
        await asyncio.sleep(5.0)
        watchdog.end(FilterBudgetSpent("none are left"))
        with pytest.raises(FilterBudgetSpent):
            await waiting

    run_virtually(waited())
