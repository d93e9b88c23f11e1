"""The settings that trainer ranks get."""

from asyncrl.app.assembly import _trainer_settings
from asyncrl.app.checks import check
from tests.unit.app.test_checks import quickstart

DECAY = ("--lr-decay-style", "cosine", "--num-rollout", "70")


def test_trainer_ranks_get_the_flag_of_the_check_before_training() -> None:
    assert not _trainer_settings(check(quickstart()), "cpu").train.check_fast_step
    assert _trainer_settings(check(quickstart("--check-fast-step")), "cpu").train.check_fast_step


def test_the_decay_of_the_learning_rate_ends_with_the_run_unless_it_is_given() -> None:
    assert _trainer_settings(check(quickstart(*DECAY)), "cpu").lr_decay_iters == 70
    given = check(quickstart(*DECAY, "--lr-decay-iters", "90"))
    assert _trainer_settings(given, "cpu").lr_decay_iters == 90


def test_updates_by_broadcast_divide_the_experts_as_the_engines_do() -> None:
    flags = ("--sglang-ep-size", "2")
    assert _trainer_settings(check(quickstart(*flags)), "cpu").num_expert_parts == 2
    assert _trainer_settings(check(quickstart()), "cpu").num_expert_parts == 1
    disk = check(quickstart(*flags, "--update-weight-transport", "disk", "--update-weight-disk-dir", "weights"))
    assert _trainer_settings(disk, "cpu").num_expert_parts == 1
