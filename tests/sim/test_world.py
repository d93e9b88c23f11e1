"""Whole simulated runs: the real pipeline around modelled engines."""

import time
from dataclasses import replace

import pytest

from asyncrl.sim.model.costs import Failures, TrainerCosts, UpdateCosts, balanced_trainer
from asyncrl.sim.model.lengths import Drawn, Observed
from asyncrl.sim.model.world import Setting, simulate
from tests.sim.settings import LENGTHS, setting

ALIKE = Drawn(shape=Observed(sorted_tokens=(100,)), cut=100)


def alike(staleness: int, **changes: object) -> Setting:
    """Answers of 100 tokens: 8 take 1.8 s to generate, and a step over 880 tokens takes ``train_s`` seconds."""
    return _with_trainer(
        replace(setting(staleness, **changes), workload=replace(setting().workload, lengths=ALIKE)), 1.0
    )


def _with_trainer(base: Setting, seconds: float) -> Setting:
    trainer = TrainerCosts(fixed_s=seconds, tokens_per_s_per_gpu=1e12)
    return replace(base, costs=replace(base.costs, trainer=trainer))


def test_synchronous_steps_add_up() -> None:
    result = simulate(alike(0))
    assert result.step_s == pytest.approx(100 * 0.018 + 1.0, rel=0.01)
    assert result.trainer_idle == pytest.approx(1.8 / 2.8, abs=0.01)
    assert result.engines_idle == pytest.approx(1.0 / 2.8, abs=0.01)
    assert (result.lag_mean, result.lag_max) == (0.0, 0)
    assert result.trained_per_s == pytest.approx(800 / result.step_s)


def test_asynchronous_steps_overlap() -> None:
    result = simulate(alike(2))
    assert result.step_s == pytest.approx(1.8, rel=0.01)
    assert result.slots_filled == pytest.approx(1.0, abs=0.01)


def test_a_pause_costs_what_it_takes() -> None:
    base = alike(2)
    paused = replace(base, costs=replace(base.costs, update=UpdateCosts(pause_s=0.5)))
    assert simulate(paused).step_s == pytest.approx(1.8 + 0.5, rel=0.01)
    assert simulate(paused).engines_idle == pytest.approx(0.5 / 2.3, abs=0.01)


def test_a_snapshot_delays_training_and_the_pause_may_delay_it_longer() -> None:
    # The trainer is the slower side at 5 s a step; engines generate meanwhile.
    base = _with_trainer(alike(2), 5.0)
    taken = replace(base, costs=replace(base.costs, update=UpdateCosts(pause_s=0.5, take_s=0.25)))
    assert simulate(taken).step_s == pytest.approx(5.0 + 0.25, rel=0.01)
    held = replace(taken, costs=replace(taken.costs, update=replace(taken.costs.update, holds_trainer=True)))
    assert simulate(held).step_s == pytest.approx(5.0 + 0.25 + 0.5, rel=0.01)


def test_one_step_off_policy_steps_take_as_long_as_the_slower_side() -> None:
    # Collecting begins with training and the update waits for it, so that every answer begins at the same moment.
    one_step = replace(alike(1).schedule, collects_before_publish=True)
    result = simulate(_with_trainer(replace(alike(1), schedule=one_step), 5.0))
    assert result.step_s == pytest.approx(5.0, rel=0.01)
    assert (result.lag_mean, result.lag_max) == (1.0, 1)
    slower = simulate(replace(alike(1), schedule=one_step))
    assert slower.step_s == pytest.approx(1.8, rel=0.01)


def test_the_same_setting_gives_the_same_outcome() -> None:
    assert simulate(setting(2)) == simulate(setting(2))
    assert simulate(setting(2)) != simulate(replace(setting(2), workload=setting(2).workload.with_seed(1)))


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
@pytest.mark.parametrize("stale", ["wait", "mask", "drop"])
def test_no_token_is_trained_above_the_bound_and_nothing_is_lost(stale: str, mode: str) -> None:
    # Every step checks that the accounts balance.
    for staleness in (1, 3):
        result = simulate(setting(staleness, stale=stale, update_mode=mode))
        assert result.lag_max <= staleness
        assert result.failed == 0
        assert (result.masked > 0) <= (stale == "mask")


def test_waiting_wastes_nothing_and_dropping_does() -> None:
    assert simulate(setting(1)).waste == 0
    assert simulate(setting(1, stale="drop")).waste > 0.1


def test_no_schedule_beats_the_ideal_and_much_staleness_comes_close() -> None:
    base = setting(8, slots_per_engine=16, groups_per_step=16, steps=20)
    engine = replace(base.costs.engine, max_running=16)
    moments = LENGTHS.moments()
    rate = balanced_trainer(engine, moments, 10, rollout_gpus=1, gpus_per_engine=1, gpus=2)
    costs = replace(base.costs, engine=engine, trainer=TrainerCosts(fixed_s=0.0, tokens_per_s_per_gpu=rate))
    ideal = costs.ideal_rate(moments, 10, gpus=2, gpus_per_engine=1)
    reached = simulate(replace(base, costs=costs)).trained_per_s / ideal
    assert 0.85 < reached < 1.1  # the lengths of a short run are not quite those of the distribution


def test_a_filter_costs_what_it_rejects_and_hardly_more() -> None:
    base = setting(2, steps=20)
    result = simulate(replace(base, workload=replace(base.workload, rejected=0.5)))
    assert result.filtered == pytest.approx(0.5, abs=0.15)
    assert result.waste <= 0.02


def test_lost_engines_cost_time_and_prefill_and_no_group() -> None:
    base = setting(2, gpus=4, rollout_gpus=3)
    shaky = replace(base, costs=replace(base.costs, failures=Failures(mean_s=5.0, restart_s=2.0)))
    whole, broken = simulate(base), simulate(shaky)
    assert broken.recomputed > 0
    assert broken.failed == 0
    assert broken.step_s > whole.step_s


def test_a_large_simulation_is_faster_than_real_time() -> None:
    base = setting(1, gpus=60, rollout_gpus=50, slots_per_engine=16, groups_per_step=200, steps=2, warm_up=1)
    start = time.process_time()
    result = simulate(base)
    assert time.process_time() - start < 5 * result.step_s
