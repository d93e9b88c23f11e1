import pytest

from asyncrl.rewards.final_answers import final_answer_of


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
        ("dapo", "Answer: 3\nno, Answer: $12$", "12"),
        ("dapo", r"\boxed{5}", "5"),
        ("dapo", "5", None),
        ("gpqa", "I think B is wrong. The answer is C", "C"),
        ("gpqa", r"A \boxed{D} or B", "D"),
        (None, r"text \boxed{x}", "x"),
        (None, " any\n text ", "any text"),
        ("f1", "words here", "words here"),
    ],
)
def test_final_answers(rm_type: str | None, text: str, expected: str | None) -> None:
    assert final_answer_of(rm_type)(text) == expected
