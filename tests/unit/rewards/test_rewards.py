import asyncio
from array import array
from decimal import Decimal
from typing import Any

import pytest

from asyncrl.app.rewards import build_reward
from asyncrl.app.user_code import UserCode
from asyncrl.compat import SlimeArgs
from asyncrl.config.areas import RewardConfig
from asyncrl.errors import RewardFailed
from asyncrl.rewards import built_in
from asyncrl.rewards.built_in import BuiltIn
from asyncrl.rewards.graders.number import last_number
from asyncrl.types import FinishReason, Prompt, Reward, Sample
from tests.unit.rewards.grading import prompt


def reward(
    rm_type: str | None, text: str, label: Any, key: str | None = None, metadata: dict[str, Any] | None = None
) -> Reward:
    prompt = Prompt(row=3, epoch=0, text="", token_ids=(1,), label=label, metadata=metadata or {})
    sample = Sample(
        index=0, token_ids=(), logprobs=array("f"), spans=(), text=text, finish=FinishReason.STOP, seconds=0.0
    )
    built = build_reward(RewardConfig(rm_type=rm_type, reward_key=key), SlimeArgs(), UserCode(start_timeout_s=1.0))

    async def call() -> Reward:
        value = await built(prompt, sample)
        assert isinstance(value, Reward)
        return value

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", None),
        ("no number", None),
        ("first 3, then 4.", "4"),
        ("it is -7", "-7"),
        ("it is \u22127", "-7"),
        ("10-5", "5"),
        ("x-5", "5"),
        ("(3)-5", "5"),
        ("= -5", "-5"),
        (r"\boxed{-5}", "-5"),
        ("1,234,567.50 in all", "1234567.50"),
        ("1, 2, 3", "3"),
        ("1,2,3", "3"),
        ("12,345,6789", "6789"),
        ("$1,000", "1000"),
        ("-$20", "-20"),
        ("50%", "50"),
        (".5", "0.5"),
        ("3.", "3"),
        ("1.5e-3", "0.0015"),
        ("2.5 eggs", "2.5"),
        ("version 1.2.3", "0.3"),
        ("#### 18", "18"),
        ("007", "7"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("rm_type", "text", "label", "expected"),
    [
        ("number", "so it is 42.0", "42", 1.0),
        ("number", "so it is 1,000", "1000", 1.0),
        ("number", "42, no, 43", "42", 0.0),
        ("number", "-42", "42", 0.0),
        ("number", "I do not know", "0", 0.0),
        ("number", "18", "16 - 3 = 13\n#### 18", 1.0),
        ("number", "9" * 5000, "9" * 5000, 1.0),
        ("exact", " yes\n", "yes", 1.0),
        ("exact", "Yes", "yes", 0.0),
        ("exact", "", "", 1.0),
    ],
)
def test_rewards(rm_type: str, text: str, label: str, expected: float) -> None:
    assert reward(rm_type, text, label).value == expected


def test_a_label_that_cannot_be_compared_with_is_a_failure() -> None:
    for rm_type in ("number", "exact", "f1"):
        with pytest.raises(RewardFailed, match="the row has no label"):
            reward(rm_type, "1", None)
    with pytest.raises(RewardFailed, match="there is no number in the label 'blue'"):
        reward("number", "1", "blue")


def test_a_row_s_own_type_goes_first() -> None:
    assert reward("exact", "it is 7", "7").value == 0.0
    assert reward("exact", "it is 7", "7", metadata={"rm_type": "number"}).value == 1.0
    assert reward(None, "it is 7", "7", metadata={"rm_type": " number "}).value == 1.0
    with pytest.raises(RewardFailed, match="the row's metadata has no rm_type, and there is no --rm-type"):
        reward(None, "it is 7", "7")
    with pytest.raises(RewardFailed, match=r'the row\'s rm_type must be one of .*, got "numbr"; did you mean number\?'):
        reward("exact", "7", "7", metadata={"rm_type": "numbr"})
    with pytest.raises(RewardFailed, match="the row's rm_type is remote_rm; give --rm-url"):
        reward("exact", "7", "7", metadata={"rm_type": "remote_rm"})


def test_a_key_that_a_row_s_type_lacks_is_a_problem_of_the_row() -> None:
    row = prompt(rm_type="dapo")
    for key, problem in (
        ("acc", None),
        ("mine", "reward-key mine with dapo, which has score and acc; give one of them"),
    ):
        assert BuiltIn("number", key=key, url=None).row_problem(row) == problem


def test_the_prefix_grades_the_box_alone() -> None:
    assert reward("boxed_exact", "so \\boxed{a b} is it", "a b").value == 1.0
    assert reward("boxed_f1", "a b", "a b").value == 0.0
    assert reward("exact", "\\boxed{7}", "7", metadata={"rm_type": "boxed_exact"}).value == 1.0


@pytest.mark.parametrize(
    ("rm_type", "response", "expected"),
    [
        ("boxed_math", "so \\boxed{7} is it", 1.0),
        ("boxed_math", "so 7 is it", 0.0),
        ("boxed_deepscaler", "\\boxed{8}</think> \\boxed{7}", 1.0),
    ],
)
def test_the_prefix_changes_nothing_for_a_reward_that_reads_the_box(
    monkeypatch: pytest.MonkeyPatch, rm_type: str, response: str, expected: float
) -> None:
    monkeypatch.setattr(built_in, "ON_LOOP", {"math": 100, "deepscaler": 100})  # there are no worker processes here
    assert reward(rm_type, response, "7").value == expected


def test_a_grader_of_the_workers_needs_a_run() -> None:
    with pytest.raises(RewardFailed, match="needs worker processes, which only a run has"):
        reward("math", "\\boxed{7}", "7")


def test_a_very_long_answer_takes_no_time() -> None:
    assert last_number("1,234," * 20_000 + "x") == 1234
