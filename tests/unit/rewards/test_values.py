from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import RewardFailed, RewardKeyMissing
from asyncrl.rewards.values import reward_of, rewards_of
from asyncrl.types import Reward

DICT = {"score": 1.5, "acc": True, "pred": "7"}


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array([1.0]), torch.tensor(1.0), torch.ones(1)])
def test_numbers_of_every_kind(value: Any) -> None:
    assert reward_of(value, None) == Reward(value=1.0)
    assert reward_of(value, "score") == Reward(value=1.0)


def test_a_dict_gives_one_entry_and_keeps_all() -> None:
    assert reward_of(DICT, "score") == Reward(value=1.5, parts=DICT)
    assert reward_of(DICT, "acc") == Reward(value=1.0, parts=DICT)
    assert reward_of({"score": np.float64(2), "loss": torch.tensor(3.0)}, "score").parts == {"score": 2.0, "loss": 3.0}


@pytest.mark.parametrize(
    ("value", "key", "line"),
    [
        (DICT, "sore", "the dict reward has no entry 'sore' (--reward-key); it has: score, acc, pred"),
        (DICT, "pred", "the entry 'pred' of a dict reward must be one number, got a str: '7'"),
        ({}, "score", "the dict reward has no entry 'score' (--reward-key); it has: no entries"),
        ("1", None, "a reward must be one number, got a str: '1'"),
        (None, None, "a reward must be one number, got a NoneType: None"),
        ([1.0, 2.0], None, "a reward must be one number, got a list: [1.0, 2.0]"),
    ],
)
def test_anything_else_is_one_line(value: Any, key: str | None, line: str) -> None:
    with pytest.raises(RewardFailed) as error:
        reward_of(value, key)
    assert str(error.value) == line


def test_a_dict_needs_a_key() -> None:
    with pytest.raises(
        RewardKeyMissing,
        match=r"^a dict reward with score, acc, pred: name one of them with --reward-key or --eval-reward-key$",
    ):
        reward_of(DICT, None)


def test_lists_of_rewards() -> None:
    assert [each.value for each in rewards_of([1, DICT], "score")] == [1.0, 1.5]
    assert [each.value for each in rewards_of(torch.tensor([1.0, 0.0]), None)] == [1.0, 0.0]
    with pytest.raises(RewardFailed, match="a list of rewards is needed, got a float"):
        rewards_of(1.0, None)
