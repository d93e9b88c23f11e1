"""A service of the rewards that goes away: the run waits, loses nothing, and ends in good order at its limit."""

import asyncio
import logging
from typing import Any

import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints
from asyncrl.errors import FailureBudgetSpent, RewardOutage, RewardUnavailable
from asyncrl.event_loop import loop_time
from asyncrl.outages import CircuitBreaker
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import Prompt, Sample
from tests.unit.pipeline.harness import World, token_sum
from tests.virtual_time import run_virtually

STEPS = 15


def away(start: float, stop: float, error: type[Exception] = ConnectionError) -> Any:
    """A reward whose service refuses every connection for a while."""

    async def reward(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0.01)
        if start < loop_time() < stop:
            raise error("reward server: connection refused")
        return await token_sum(prompt, sample)

    return reward


def busy(**changes: Any) -> World:
    """A run that keeps many groups in flight."""
    settings: dict[str, Any] = {
        "steps": STEPS,
        "groups_per_step": 8,
        "group_size": 2,
        "slots": 128,
        "chunk": 200,
        "staleness": 2,
        "lengths": lambda request: 50 + request.seed % 950,
        "train_seconds": 3.0,
        "max_failed_groups": 16,
    }
    return World(**(settings | changes))


def test_a_minute_without_the_rewards_service_costs_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    usual = busy(reward=away(0.0, 0.0)).run()
    with caplog.at_level(logging.WARNING):
        world = busy(reward=away(20.0, 80.0)).run()
    assert len(world.trainer.batches) == STEPS
    counts = world.scheduler.gauges().groups
    assert counts.failed == 0
    assert usual.seconds + 50.0 < world.seconds < usual.seconds + 110.0
    assert max(world.lags) <= 2
    began, ended = (record.getMessage() for record in caplog.records if "the reward function" in record.getMessage())
    assert "every call to the reward function has failed for 0 s (last: row " in began
    assert "connection refused); " in began
    assert " answers wait for it, and no new group starts; one call at a time is repeated" in began
    assert ended.startswith("the reward function answers again after ")
    outages = [facts.scheduler.outage_s for facts in world.facts]
    assert outages[0] == 0.0
    assert 60.0 < outages[-1] < 110.0


def test_no_group_starts_during_an_outage_and_the_view_says_why() -> None:
    world = busy(reward=away(20.0, 80.0))
    seen: list[tuple[float, int, str | None]] = []

    async def watched() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(world.main())
            while not running.done():
                await asyncio.sleep(1.0)
                gauges = world.scheduler.gauges()
                seen.append((loop_time(), gauges.groups.admitted, gauges.waits_for))

    run_virtually(watched())
    during = [(admitted, reason) for when, admitted, reason in seen if 22.0 < when < 80.0]
    assert len({admitted for admitted, _ in during}) == 1
    assert all(reason is not None and "no new group starts" in reason for _, reason in during)
    assert seen[-1][2] is None


@pytest.mark.parametrize("stale", ["wait", "mask", "drop"])
def test_the_staleness_bound_holds_over_an_outage(stale: str) -> None:
    world = busy(reward=away(20.0, 80.0), stale=stale, staleness=1).run()
    assert len(world.trainer.batches) == STEPS
    assert max(world.lags) <= 1
    assert world.scheduler.gauges().groups.failed == 0


def test_rewards_that_fail_for_another_reason_end_the_run_as_before() -> None:
    world = busy(reward=away(20.0, 1e9, ValueError))
    with pytest.raises(FailureBudgetSpent, match="ValueError: reward server"):
        world.run()


def test_an_outage_that_lasts_ends_the_run_with_a_checkpoint_that_resumes() -> None:
    checkpoints = FakeCheckpoints(0.1)
    world = busy(reward=away(20.0, 1e9), checkpoints=checkpoints, save_interval=1000, reward_outage_s=300.0)
    with pytest.raises(RewardOutage, match=r"has failed for 300 s \(last: row .*the limit is 300 s"):
        world.run()
    step = len(world.trainer.batches)
    assert list(checkpoints.written) == [step], "the state after the last trained step"
    before = RunState.from_json(orjson.loads(orjson.dumps(checkpoints.written[step])))
    resumed = busy(reward=away(0.0, 0.0), before=before).run()
    assert [batch.step for batch in resumed.trainer.batches] == list(range(step, STEPS))
    assert resumed.scheduler.gauges().groups.failed == 0


def test_an_outage_that_begins_while_the_trainer_waits_has_its_own_limit() -> None:
    """Without staleness the trainer already waits when the first answer ends."""
    world = busy(reward=away(0.0, 1e9), staleness=0, reward_outage_s=50.0, watchdog_s=1000.0)
    with pytest.raises(RewardOutage, match="has failed for 50 s"):
        world.run()


def test_an_outage_while_training_goes_on_ends_nothing() -> None:
    """The limit counts while the trainer waits for a batch: one long step may outlast the outage."""
    world = busy(reward=away(40.0, 290.0), train_seconds=300.0, steps=3, reward_outage_s=200.0).run()
    assert len(world.trainer.batches) == 3


def test_the_watchdog_does_not_count_an_outage() -> None:
    world = busy(reward=away(20.0, 1020.0), watchdog_s=100.0).run()
    assert len(world.trainer.batches) == STEPS


def test_answers_that_hang_the_reward_are_no_outage() -> None:
    """Their groups fail, after one time limit each; an outage would hold the run until its own limit."""
    hung: set[int] = set()

    async def reward(prompt: Prompt, sample: Sample) -> float:
        if loop_time() > 20.0 and len(hung) < 5:
            hung.add(prompt.row)
            await asyncio.sleep(1e6)
        return await token_sum(prompt, sample)

    world = busy(reward=reward, staleness=0).run()
    assert len(world.trainer.batches) == STEPS
    assert 1 <= world.scheduler.gauges().groups.failed <= 5
    assert world.facts[-1].scheduler.outage_s == 0.0


def test_the_last_evaluation_is_given_up_after_an_outage_of_its_rewards(caplog: pytest.LogCaptureFixture) -> None:
    """Training and the evaluation share one service, whose calls wait for as long as it takes."""
    breaker = CircuitBreaker("http://rewards", limit_s=200.0, holds_groups=True)

    async def reward(prompt: Prompt, sample: Sample) -> float:
        async def attempt() -> float:
            if len(world.trainer.batches) == 3:
                raise RewardUnavailable("refused", False)
            return await token_sum(prompt, sample)

        return await breaker.call(attempt)

    reward.has_deadlines = True  # type: ignore[attr-defined]  # as the reward of a service
    world = World(steps=3, held_out=4, eval_interval=1, reward=reward, hold=breaker, reward_outage_s=200.0)
    with caplog.at_level(logging.WARNING):
        world.run()
    assert len(world.facts) == 3
    assert world.facts[-1].evaluation is None
    assert 200.0 < world.seconds < 300.0
    assert "the evaluation is given up: every call to http://rewards has failed for 200 s" in caplog.text
