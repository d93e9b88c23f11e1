"""Our graders give the verdicts of slime's graders on a recorded set, apart from a list of argued differences.

``slime_verdicts.jsonl`` holds responses and labels in the formats of mathematical data sets, with the results of
slime's graders at SLIME.  A result that is an exception's name means that slime's grader raised.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders import GRADERS

SLIME = "624b824a"
"""The commit of slime whose graders were run, with sympy 1.14.0 and pylatexenc 2.11."""

ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "slime_verdicts.jsonl").read_text().splitlines()
]

SAME_VALUE = "The two are equal for every value of their variables; slime does not read a power in braces."
PARENTHESES = "The two are equal; slime's text of the fraction loses the parentheses of its numerator or denominator."
COMMAS = "The two are the same set; slime compares sets as texts, so it depends on an order that sets do not have."
UNITS = "The label has no unit, and slime drops other units of this kind, but this one is not in its list."
ENDPOINT = "The two intervals are the same set of numbers; slime compares unions, signs and relations as texts."

EQUAL: dict[tuple[str, str], str] = {
    (r"\frac{x+1}{2}", r"\frac{x}{2}+\frac{1}{2}"): PARENTHESES,
    (r"\frac{1}{1+x}", "1/(1+x)"): PARENTHESES,
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"): PARENTHESES,
    (r"\frac{3}{4}.", r"\frac{3}{4}"): "A full stop ends the sentence and is no part of the answer.",
    ("45\u00b0", "45"): "The degree sign means what ^\\circ means, which slime drops.",
    ("5.50 dollars", "5.5"): UNITS,
    ("5 dollars", "5"): UNITS,
    ("10 km", "10"): UNITS,
    ("2^{1/3}", r"\sqrt[3]{2}"): SAME_VALUE,
    (r"2^{\frac{1}{2}}", r"\sqrt{2}"): SAME_VALUE,
    (r"\sqrt{x}", "x^{1/2}"): SAME_VALUE,
    ("2^{n+1}", r"2 \cdot 2^n"): SAME_VALUE,
    ("x+y+z", "z+y+x"): "Addition commutes; slime evaluates no expression with more than two letters.",
    ("f(x)=x^2", "x^2"): "The answer names the function that the label gives; slime drops y= but not f(x)=.",
    (r"\ln 2", r"\ln(2)"): "The parentheses change nothing; slime reads ln2 as a name.",
    (r"\sin x", r"\sin(x)"): "The parentheses change nothing; slime reads sinx as a name.",
    (r"2\pi", r"\pi 2"): "Multiplication commutes; slime reads pi2 as a name.",
    (r"(\sqrt{8}, 1)", r"(2\sqrt{2}, 1)"): "Both elements are equal; slime's tuple breaks at the root's parentheses.",
    (r"(1, \infty) \cup (-\infty, 0)", r"(-\infty,0)\cup(1,\infty)"): ENDPOINT,
    (r"(-\infty, +\infty)", r"(-\infty, \infty)"): ENDPOINT,
    ("x > 3", "3 < x"): ENDPOINT,
    (r"\{2,1\}", r"\{1,2\}"): COMMAS,
    (r"\{a,b\}", r"\{b,a\}"): COMMAS,
    (
        r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}",
        r"\begin{pmatrix} \frac{1}{2} \\ 2 \end{pmatrix}",
    ): "The entries are equal; slime compares matrices as texts.",
    (r"1\,000", "1000"): "A thin space separates thousands in LaTeX, as the comma does, which slime drops.",
    ("~5", "5"): "A tie is a space in LaTeX.",
    (r"3 \pm 2\sqrt{2}", r"3+2\sqrt{2}, 3-2\sqrt{2}"): "The label lists the two values that the sign stands for.",
}
"""Answers that equal their label, in boxes, which slime's math grader rejects: (answer, label) and the argument."""

UNEQUAL: dict[tuple[str, str], str] = {
    ("5" * 40, "5" * 39 + "6"): "The numbers differ in their last digit; slime converts both to a double.",
}
"""Answers that differ from their label, which slime's math grader accepts: (answer, label) and the argument."""

EXACT = "a label is compared with all its digits; slime reads it as a float, which keeps 15 of them"
NOT_TRUNCATED = "slime truncates the label to an integer, so it rejects the label itself and accepts its floor."
DAPO: dict[tuple[str, str], str] = {
    ("0.5", "0.5"): NOT_TRUNCATED,
    ("3.14159", "3.14159"): NOT_TRUNCATED,
    (r"\$5.50", "5.50"): NOT_TRUNCATED,
    (r"0.\overline{3}", r"0.\overline{3}"): NOT_TRUNCATED,
    ("5" * 40, "5" * 40): EXACT,
}
"""Answers that equal their label, which slime's dapo grader rejects: (answer, label) and the argument."""


def boxed(row: dict[str, Any]) -> tuple[str, str]:
    """Return the answer of the common frame of the set, and the label."""
    found = row["response"].partition("The result is \\boxed{")[2].partition("}.\n\nAnswer: ")[0]
    return found, row["label"]


def ours(grader: str, row: dict[str, Any]) -> Any:
    value = GRADERS[grader](row["response"], row["label"], {})
    return value["score"] if isinstance(value, dict) else value


def test_the_set_is_large_and_varied() -> None:
    kinds = Counter(row["kind"] for row in ROWS)
    assert len(ROWS) >= 300
    assert len(kinds) >= 14
    assert min(kinds.values()) >= 8
    pairs = {(row["response"], row["label"]) for row in ROWS}
    assert len(pairs) >= len(ROWS) - 4
    right = sum(row["math"] == 1 for row in ROWS)
    assert 0.3 * len(ROWS) < right < 0.7 * len(ROWS)


@pytest.mark.parametrize("grader", ["math", "deepscaler"])
def test_boxed_answers(grader: str) -> None:
    differ = {}
    for row in ROWS:
        assert row[grader] in (0, 1), "slime's grader never raises on the set"
        if ours(grader, row) != row[grader]:
            differ[boxed(row)] = row[grader]
    assert differ == dict.fromkeys(EQUAL, 0) | dict.fromkeys(UNEQUAL, 1)


def test_answer_lines() -> None:
    differ = {boxed(row): row["dapo"] for row in ROWS if row["dapo"] in (1, -1) and ours("dapo", row) != row["dapo"]}
    assert differ == dict.fromkeys(DAPO, -1)


def test_labels_that_end_a_run_of_slime_are_compared_as_texts() -> None:
    raised = [row for row in ROWS if row["dapo"] not in (1, -1)]
    assert {row["dapo"] for row in raised} == {"ValueError"}
    for row in raised:
        assert ours("dapo", row) in (1.0, -1.0)
    assert GRADERS["dapo"]("Answer: \\frac{1}{2}", "\\frac12", {}) == {
        "score": 1.0,
        "acc": True,
        "pred": "\\frac{1}{2}",
    }


def test_the_differences_are_few_and_argued() -> None:
    assert len(EQUAL) + len(UNEQUAL) < 0.07 * len(ROWS)
    assert all(len(reason.split()) > 5 for reason in (*EQUAL.values(), *UNEQUAL.values(), *DAPO.values()))


@pytest.mark.parametrize("grader", ["math", "deepscaler", "dapo", "exact", "number", "f1"])
def test_a_row_without_a_label_is_a_failure(grader: str) -> None:
    with pytest.raises(RewardFailed, match="the row has no label"):
        GRADERS[grader]("</think> \\boxed{1}", None, {})
