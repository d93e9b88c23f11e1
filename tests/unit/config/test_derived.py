"""Defaults and notes that depend on several settings."""

import dataclasses
from pathlib import Path

import pytest

from asyncrl.config import load_run
from asyncrl.config.areas import RewardConfig, RolloutConfig, TrainConfig
from asyncrl.config.derived import num_known_ids, skip_special_tokens
from asyncrl.config.notes import notes_of
from tests.unit.config.runs import complete

ROLLOUT = RolloutConfig(num_rollout=1, rollout_batch_size=1)


@pytest.mark.parametrize(
    ("reward", "skips"),
    [
        (RewardConfig(rm_type="exact"), True),
        (RewardConfig(rm_type="number"), True),
        (RewardConfig(rm_type="f1"), True),
        (RewardConfig(rm_type="math"), False),
        (RewardConfig(custom_rm_path="module:reward"), False),
        (RewardConfig(custom_rm_path="module:reward", rm_type="number"), False),
    ],
)
def test_special_tokens_are_skipped_by_default_only_for_rewards_that_grade_whole_texts(
    reward: RewardConfig, skips: bool
) -> None:
    assert skip_special_tokens(ROLLOUT, reward) is skips
    for given in (True, False):
        assert skip_special_tokens(dataclasses.replace(ROLLOUT, rollout_skip_special_tokens=given), reward) is given


SEEDED = ("--sglang-enable-deterministic-inference", "--eval-interval", "5", "--eval-prompt-data", "sums", "sums.jsonl")


@pytest.mark.parametrize(
    ("more", "is_noted"),
    [
        (("--eval-temperature", "0"), True),
        (("--eval-temperature", "1"), False),
        (("--eval-temperature", "0", "--rollout-top-p", "0.9"), False),
        (("--eval-temperature", "0", "--device", "cpu"), False),
    ],
)
def test_greedy_evaluation_is_noted_where_it_changes_seeded_samples(
    tmp_path: Path, more: tuple[str, ...], is_noted: bool
) -> None:
    run = load_run([*complete(tmp_path), *SEEDED, *more, "--dry-run"])
    assert any("changes the training samples" in line for line in notes_of(run)) is is_noted


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--use-score-centering --eps-clip 0.1 --eps-clip-high 0.3", ["eps-clip", "eps-clip-high"]),
        ("--use-score-centering --use-rollout-logprobs", ["use-rollout-logprobs"]),
        ("--advantage-estimator ppo --disable-grpo-std-normalization", ["disable-grpo-std-normalization"]),
        ("--use-tis --tis-mode whole --tis-clip 3", ["tis-clip"]),
        ("--use-tis --tis-clip 3 --eps-clip 0.1 --disable-grpo-std-normalization", []),
    ],
)
def test_settings_that_the_objective_does_not_have_are_noted(tmp_path: Path, flags: str, noted: list[str]) -> None:
    run = load_run([*complete(tmp_path), *flags.split(), "--dry-run"])
    assert [line.partition(" has no effect: ")[0] for line in run.notes if " has no effect: " in line] == noted


@pytest.mark.parametrize(("train", "number"), [(TrainConfig(), 0), (TrainConfig(use_score_centering=True), 64)])
def test_a_vocabulary_smaller_than_the_number_of_likeliest_ids_is_known_whole(train: TrainConfig, number: int) -> None:
    assert num_known_ids(train, vocab_size=64) == number
    assert num_known_ids(train, vocab_size=1_000) == 2 * number
