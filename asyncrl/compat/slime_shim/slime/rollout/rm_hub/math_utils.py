"""Equality of mathematical answers.

slime's two comparisons, of spellings and of expressions, are one here: asyncrl's grader, which accepts what either of
them accepts, and which needs no package for LaTeX.
"""

from typing import Any

from asyncrl.rewards.graders.boxed import last_boxed
from asyncrl.rewards.graders.math import is_equal

__all__ = [
    "extract_answer",
    "extract_boxed_answer",
    "grade_answer_mathd",
    "grade_answer_sympy",
    "grade_answer_verl",
    "last_boxed_only_string",
    "remove_boxed",
]


def extract_answer(passage: str) -> str | None:
    """Return the content of the last ``\\boxed{}``, or None."""
    return last_boxed(passage) if "\\boxed" in passage else None


def extract_boxed_answer(solution: str) -> str | None:
    """Return the content of the last ``\\boxed{}``, or None."""
    return last_boxed(solution)


def last_boxed_only_string(string: str) -> str | None:
    """Return the last ``\\boxed{...}`` of a text, or None."""
    inner = last_boxed(string)
    return None if inner is None else f"\\boxed{{{inner}}}"


def remove_boxed(s: str | None) -> str | None:
    """Return the content of ``\\boxed{...}``; None for anything else."""
    return s[7:-1] if s is not None and s.startswith("\\boxed{") and s.endswith("}") else None


def grade_answer_mathd(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers are equal."""
    return given_answer is not None and ground_truth is not None and is_equal(str(given_answer), str(ground_truth))


def grade_answer_sympy(given_answer: str | None, ground_truth: str | None) -> bool:
    """Return whether two answers are equal."""
    return grade_answer_mathd(given_answer, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Return whether the last ``\\boxed{}`` of a response equals the label, which may be in a box as well."""
    if not ground_truth:
        return False
    wanted = str(ground_truth)
    return grade_answer_mathd(extract_answer(solution_str), extract_answer(wanted) if "\\boxed" in wanted else wanted)
