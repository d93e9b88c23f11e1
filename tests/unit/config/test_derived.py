"""Defaults that depend on several settings."""

import dataclasses

import pytest

from asyncrl.config.areas import RewardConfig, RolloutConfig
from asyncrl.config.derived import skip_special_tokens

ROLLOUT = RolloutConfig(num_rollout=1, rollout_batch_size=1)


@pytest.mark.parametrize(
    ("reward", "skips"),
    [
        (RewardConfig(rm_type="exact"), True),
        (RewardConfig(rm_type="number"), True),
        (RewardConfig(custom_rm_path="module:reward"), False),
        (RewardConfig(custom_rm_path="module:reward", rm_type="number"), False),
    ],
)
def test_special_tokens_are_skipped_by_default_only_for_rewards_that_compare_texts(
    reward: RewardConfig, skips: bool
) -> None:
    assert skip_special_tokens(ROLLOUT, reward) is skips
    for given in (True, False):
        assert skip_special_tokens(dataclasses.replace(ROLLOUT, rollout_skip_special_tokens=given), reward) is given
