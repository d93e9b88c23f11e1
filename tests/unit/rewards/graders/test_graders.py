"""The graders on labels of every kind."""

import time
from typing import Any

import pytest

from asyncrl.config.areas.rewards import GRADERS as NAMES
from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders import GRADERS
from asyncrl.rewards.graders.boxed import last_boxed
from asyncrl.rewards.graders.dapo import answer_line
from asyncrl.rewards.graders.math import is_equal

CHOICES = {"choices": ["a cat", "a dog", "a cow"]}


def test_the_configuration_knows_every_grader() -> None:
    assert sorted(GRADERS) == sorted(NAMES)


@pytest.mark.parametrize(
    ("grader", "response", "label", "expected"),
    [
        ("math", "\\boxed{7}", 7, 1.0),
        ("math", "\\boxed{0}", 0, 1.0),
        ("math", "\\boxed{7}", 7.5, 0.0),
        ("math", "\\boxed{7}", ["8", 7], 1.0),
        ("math", "\\boxed{7}", {"ground_truth": "7", "style": "rule"}, 1.0),
        ("math", "\\boxed{7}", {"answer": ["6", "7"]}, 1.0),
        ("deepscaler", "</think>\\boxed{7}", ["8", "9"], 0.0),
        ("exact", " yes ", ["no", "yes"], 1.0),
        ("number", "it is 3", {"label": 3}, 1.0),
        ("f1", "The cat sat", "a cat sat down", 0.8),
        ("f1", "the cat", ["dog", "cat"], 1.0),
        ("f1", "yes", "yes it is", 0.0),
        ("f1", "", "a cat", 0.0),
        ("f1", "", "", 0.0),
        ("gpqa", "The answer is (B).", "A", 0.0),
        ("gpqa", "Answer: B", "b", 1.0),
        ("gpqa", "I think A. No: <think>A</think> C is correct", 2, 1.0),
        ("gpqa", "it must be B", "B", 1.0),
        ("gpqa", "no letter at all", "B", 0.0),
        ("gpqa", "it is x", None, 0.0),
        ("gpqa", "The answer is A", ["A"], 1.0),
        ("gpqa", "The answer is C", ["A", 2], 1.0),
        ("gpqa", "The answer is B", ["A", "C"], 0.0),
        ("gpqa", "The answer is A", {"answer": "A"}, 1.0),
        ("gpqa", "The answer is C", {"label": 2}, 1.0),
    ],
)
def test_a_grade(grader: str, response: str, label: Any, expected: float) -> None:
    assert GRADERS[grader](response, label, {}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (0.00001, "0.00001"),
        (-2.5e-7, "-0.00000025"),
        (1e22, "10000000000000000000000"),
        (1e-05, "1e-05"),
        (0.5, "0.5"),
        ([3, 1e-05], "0.00001"),
        (123456789012345678901234567890, "123456789012345678901234567890"),
        (2**53 + 1, "9007199254740993"),
    ],
)
def test_a_number_accepts_the_answer_with_all_its_digits(label: Any, answer: str) -> None:
    graded = {"math": f"\\boxed{{{answer}}}", "exact": answer, "number": answer, "f1": answer}
    assert {name: GRADERS[name](response, label, {}) for name, response in graded.items()} == dict.fromkeys(graded, 1.0)
    assert answer_line(f"Answer: {answer}", label, {})["acc"]
    assert not answer_line(f"Answer: {answer}1", label, {})["acc"]


@pytest.mark.parametrize(
    ("label", "prediction", "is_right"),
    [
        ("7.0", "7", True),
        ("1e23", "100000000000000000000000", True),
        ("9007199254740993", "9007199254740992", False),
        ("-0.0", "0", True),
        ("7.5", "7.5", True),
        ("1e999999999", "1e999999999", True),
        ("1e-999999999", "1e-999999999", True),
        ("inf", "inf", True),
        ("nan", "nan", True),
        (float("nan"), "nan", True),
        (float("inf"), "Infinity", False),
    ],
)
def test_dapo_reads_an_integer_exactly(label: Any, prediction: str, is_right: bool) -> None:
    assert answer_line(f"Answer: {prediction}", label, {})["acc"] is is_right


@pytest.mark.parametrize(
    ("response", "label", "metadata", "expected"),
    [
        ("it is b", "a dog", CHOICES, 0.0),
        ("Answer: B", "a dog", CHOICES, 1.0),
        ("Answer: B", "a dog", {"choices": {"x": "a cat", "y": "a dog"}}, 1.0),
        ("It is a dog!", "a dog", CHOICES, 1.0),
        ("Answer: Q", None, {"valid_letters": ["p", "q"], "correct_letter": "q"}, 1.0),
        ("Answer: B", "x", {"correct_letter": "B"}, 1.0),
        ("nothing but forty two", None, {"correct_answer": "Forty-two"}, 1.0),
        ("The answer is (B).", "B", {}, 1.0),
        ("The correct answer is: **B**", "B", {}, 1.0),
        (r"The answer is $\boxed{B}$.", "B", {}, 1.0),
        ("answer: b", "B", {}, 1.0),
        ("Answer:\n\nB", "B", {}, 1.0),
        ("B is the answer. A train would be late.", "B", {"valid_letters": "BCD"}, 1.0),
        ("Which one is correct? It is B.", "B", {}, 1.0),
        ("The method is correct, so it is B.", "B", {"valid_letters": "ABCD"}, 1.0),
        ("The answer choice is D.", "D", {"valid_letters": "ABCD"}, 1.0),
        ("The answer choice is D.", "C", {"valid_letters": "ABCD"}, 0.0),
        ("(C) is the correct option.", "C", {"valid_letters": "ABCD"}, 1.0),
        ("no clue at all", "A", {}, 0.0),
        ("it is a question", "A", {"correct_letter": "B"}, 0.0),
        ("It is two!", "two", {"choices": ["one", "two"], "valid_letters": "A"}, 1.0),
        ("it cannot be a dog", "a", {"choices": ["a cat", "a cow"]}, 0.0),
        ("the sum is 112", "12", {}, 0.0),
        ("the sum is 12.", "12", {}, 1.0),
        ("Answer: B", "1", {"choices": ["-1", "1"]}, 1.0),
        ("Answer: A", "1", {"choices": ["-1", "1"]}, 0.0),
        ("Answer: B", "\u5df4\u9ece", {"choices": ["\u4f26\u6566", "\u5df4\u9ece"]}, 1.0),
        ("Answer: B", "\u5df4\u9ece ", {"choices": ["\u4f26\u6566", " \u5df4\u9ece"]}, 1.0),
        ("Answer: A", "A dog!", {"choices": ["a dog", "a cat"]}, 1.0),
        ("(B) Paris", 9, {"choices": ["", "Paris"], "correct_answer": "Paris"}, 1.0),
    ],
)
def test_a_choice(response: str, label: Any, metadata: dict[str, Any], expected: float) -> None:
    assert GRADERS["gpqa"](response, label, metadata) == expected


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ({"id": 3, "text": "x"}, "the label is an object with id, text; the grader needs one of ground_truth, answer"),
        ([], "the label is an empty list"),
        ({}, "the label is an object with no keys"),
    ],
)
def test_a_label_that_cannot_be_compared_with(label: Any, line: str) -> None:
    with pytest.raises(RewardFailed) as error:
        GRADERS["math"]("\\boxed{1}", label, {})
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} \\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{1} \\boxed{2", None),
        ("\\boxed 1", None),
        ("nothing", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("9" * 10_000, "1"),
        ("9^{9^{9^{9}}}", "1"),
        ("10**1000000", "1"),
        ("(((((1)!)!)!)!)!", "2"),
        ("100000000!", "1"),
        ("x^{1000000}", "x^{1000001}"),
        ("(" * 500, "1"),
        ("\\frac{" * 200, "1"),
        ("1" + "+1" * 5_000, "5001"),
        ("\\sqrt{" * 50 + "2" + "}" * 50, "1"),
    ],
)
@pytest.mark.timeout(60)
def test_an_answer_that_would_compute_for_hours_is_wrong_soon(given: str, wanted: str) -> None:
    assert not is_equal(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted", "is_right"),
    [
        ("(100, 200)", "(100,200)", True),
        (r"\left(100, 200\right)", "(100,200)", True),
        ("(0.5, 100)", "(1/2,100)", True),
        ("[100,200]", "[100, 200]", True),
        (r"\{100, 200\}", r"\{100,200\}", True),
        ("10, 100, 1000", "10,100,1000", True),
        ("(1,000, 2,000)", "(1000,2000)", True),
        ("(100, 201)", "(100,200)", False),
        ("[100, 200]", "(100,200)", False),
        ("(100, 200)", "100200", False),
        ("1,000", "1,0", False),
        ("1,000", "(1, 0)", False),
    ],
)
def test_a_comma_before_three_digits_separates_thousands_or_elements(given: str, wanted: str, is_right: bool) -> None:
    assert is_equal(given, wanted) is is_right
    assert is_equal(wanted, given) is is_right


@pytest.mark.parametrize(
    ("given", "wanted", "is_right"),
    [
        ("1e-3", "0.001", True),
        ("12.5e3", "12500", True),
        ("1.50E+3", "1500", True),
        ("1e-3", "0.01", False),
        ("x^2e3", "x^2000", False),
        (r"\dbinom{5}{2}", r"\binom{5}{2}", True),
        (r"\tbinom{5}{2}", r"\binom{5}{3}", False),
    ],
)
def test_powers_of_ten_and_sizes_of_binomials_are_spellings(given: str, wanted: str, is_right: bool) -> None:
    assert is_equal(given, wanted) is is_right


def test_chance_gives_both_values() -> None:
    assert {GRADERS["random"]("", None, {}) for _ in range(100)} == {0.0, 1.0}


@pytest.mark.parametrize("answer", ["1" + r"\quad " * 3500 + "2", "1" + r"\!" * 4900 + "2"])
def test_a_degenerate_answer_takes_no_time(answer: str) -> None:
    start = time.process_time()
    assert not is_equal(answer, "3")
    assert is_equal(answer, answer.replace(" ", "  "))
    assert time.process_time() - start < 1.0
