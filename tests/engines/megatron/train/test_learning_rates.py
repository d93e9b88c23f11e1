"""The learning rate of every training step, against Megatron-core's scheduler and through a trainer."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from asyncrl.algorithms.learning_rate import LearningRateSchedule
from asyncrl.engines.megatron.train.learning_rates import critic_schedule, policy_schedule
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings, write_checkpoint

PPO = {"advantage_estimator": "ppo", "critic_lr": 1e-4, "critic_lr_warmup_iters": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("rates") / "hf")


def megatrons(schedule: LearningRateSchedule, group: dict[str, Any]) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_iters,
        lr_decay_steps=schedule.decay_iters,
        lr_decay_style=schedule.style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "end"), [(0, 12), (3, 12), (5, 7)])
def test_rates_are_those_of_megatron(style: Literal["constant", "linear", "cosine"], warmup: int, end: int) -> None:
    """During the warm-up they are one step ahead, so that the first step is not lost."""
    schedule = LearningRateSchedule(lr=3e-5, style=style, min_lr=2e-6, warmup_iters=warmup, decay_iters=end)
    group: dict[str, Any] = {"lr": 0.0}
    scheduler = megatrons(schedule, group)
    expected = []
    for _ in range(16):
        expected.append(group["lr"])
        scheduler.step(1)
    for step in range(15):
        assert schedule.rate(step) == pytest.approx(expected[step + (step < warmup)], rel=1e-12)


def test_a_trainer_reports_the_rate_of_its_step_whatever_the_number_of_updates(checkpoint: Path) -> None:
    settings = trainer_settings(checkpoint, lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=2)
    settings = replace(settings, lr_decay_iters=10, num_steps_per_rollout=2)
    schedule = policy_schedule(settings)
    with one_rank(settings) as rank:  # step 7 first: the rate depends on the step alone, as after a resume
        steps = (7, 0, 1, 2, 9, 10, 30)
        rates = [rank.train(random_batch(groups=2, step=step)).learning_rate for step in steps]
    assert rates == [schedule.rate(step) for step in steps]
    assert rates[-2:] == [1e-4, 1e-4]


def test_the_critic_decays_from_its_rate_after_its_warm_up(checkpoint: Path) -> None:
    settings = trainer_settings(checkpoint, lr=1e-3, min_lr=1e-5, lr_decay_style="linear", **PPO)
    settings = replace(settings, lr_decay_iters=12)
    schedule = critic_schedule(settings)
    assert [schedule.rate(step) for step in (0, 1, 2, 7, 12)] == pytest.approx([5e-5, 1e-4, 1e-4, 5.5e-5, 1e-5])
    with one_rank(settings) as rank:
        rank.train(random_batch(groups=2, step=7))
        assert rank._critic is not None  # noqa: SLF001
        (rate,) = {group["lr"] for group in rank._critic.learner.optimizer.param_groups}  # noqa: SLF001
    assert rate == schedule.rate(7)


def test_the_policy_warms_up_when_it_is_first_trained(checkpoint: Path) -> None:
    settings = trainer_settings(checkpoint, lr=1e-3, lr_warmup_iters=4, num_critic_only_steps=4, **PPO)
    assert [policy_schedule(settings).rate(step) for step in (4, 5, 7, 8)] == pytest.approx([2.5e-4, 5e-4, 1e-3, 1e-3])
    assert critic_schedule(settings).rate(0) == 5e-5
    with one_rank(settings) as rank:
        assert rank.train(random_batch(groups=2, step=4)).learning_rate == 2.5e-4


def test_a_warm_up_may_be_a_fraction_of_the_decay(checkpoint: Path) -> None:
    settings = trainer_settings(checkpoint, lr=1.0, lr_decay_style="linear", lr_warmup_fraction=0.2, lr_decay_iters=10)
    assert [policy_schedule(settings).rate(step) for step in (0, 1, 2, 6)] == pytest.approx([0.5, 1, 1, 0.5])
