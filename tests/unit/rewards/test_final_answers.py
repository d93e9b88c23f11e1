from typing import Any

import pytest

from asyncrl.rewards.final_answers import final_answer_of
from asyncrl.types import Prompt


def prompt(**metadata: Any) -> Prompt:
    return Prompt(row=0, epoch=0, text="q", token_ids=(1,), label=None, metadata=metadata)


@pytest.mark.parametrize(
    ("rm_type", "text", "expected"),
    [
        ("number", "so 3 + 4 = 7.0.", "7"),
        ("number", "it is 1,234.50 dollars", "1234.5"),
        ("number", "minus zero: -0", "0"),
        ("number", "none", None),
        ("exact", "  a  b\n", "a b"),
        ("math", r"first \boxed{1}, then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        ("math", r"\boxed{unbalanced", None),
        ("math", "7", None),
        ("boxed_math", r"\boxed{ 7 }", "7"),
        ("boxed_number", r"\boxed{5} in 2 steps", "5"),
        ("boxed_number", "5 in 2 steps", None),
        ("boxed_exact", r"one way to \boxed{ a  b }", "a b"),
        ("boxed_exact", r"another way to \boxed{a b}.", "a b"),
        ("boxed_f1", "no box", None),
        ("dapo", "Answer: 3\nno, Answer: $12$", "12"),
        ("dapo", r"\boxed{5}", "5"),
        ("dapo", "5", None),
        ("gpqa", "I think B is wrong. The answer is C", "C"),
        ("gpqa", r"A \boxed{D} or B", "D"),
        ("gpqa", "The answer is (B). I am sure.", "B"),
        ("gpqa", "Answer: A\n\nOptions B and C are wrong.", "A"),
        (None, r"text \boxed{x}", "x"),
        (None, " any\n text ", "any text"),
        ("f1", "words here", "words here"),
    ],
)
def test_final_answers(rm_type: str | None, text: str, expected: str | None) -> None:
    assert final_answer_of(rm_type)(prompt(), text) == expected


@pytest.mark.parametrize("rm_type", [None, "exact"])
def test_a_row_that_names_its_reward_has_the_final_answer_of_that_reward(rm_type: str | None) -> None:
    assert final_answer_of(rm_type)(prompt(rm_type=" number "), "so 3 + 4 = 7.0.") == "7"
    assert final_answer_of(rm_type, is_function=True)(prompt(rm_type="number"), "so 7") == "so 7"


def test_a_letter_that_no_option_has_is_no_vote() -> None:
    row = prompt(choices=["a cat", "a dog", "a cow", "a hen"])
    assert final_answer_of("gpqa")(row, "It must be B, I think.") == "B"
    assert final_answer_of("gpqa")(row, "I do not know.") is None
