"""The reward of DAPO: the last line ``Answer: X`` of a response."""

from typing import Any

from asyncrl.rewards.graders.boxed import last_boxed
from asyncrl.rewards.graders.dapo import TAIL, answer_line, normalised

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]

_BOX_TAIL = 100
"""Characters at the end of a response in which a strict box is searched."""


def compute_score(
    solution_str: str,
    ground_truth: Any,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return ``score`` (1.0 or -1.0), ``acc`` and ``pred``; with ``strict_box_verify`` of the last ``\\boxed{}``."""
    if not strict_box_verify:
        return answer_line(solution_str, ground_truth, {})
    start = -_BOX_TAIL if pause_tokens_index is None else pause_tokens_index[-1] - _BOX_TAIL
    given = last_boxed(solution_str[-TAIL:][start:])
    is_right = given == ground_truth
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": given}


def normalize_final_answer(final_answer: Any) -> str:
    """Return an answer without units, markup and commas in numbers."""
    return normalised(str(final_answer))


def last_boxed_only_string(string: str) -> str | None:
    """Return the last ``\\boxed{...}`` of a text, or None."""
    inner = last_boxed(string)
    return None if inner is None else f"\\boxed{{{inner}}}"


def remove_boxed(s: str) -> str:
    """Return the content of ``\\boxed{...}``."""
    return s.removeprefix("\\boxed{").removesuffix("}")
