"""The answers that a label accepts.  A label is text, a number, a list of acceptable answers, or an object."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from asyncrl.errors import RewardFailed

ANSWER_KEYS = ("ground_truth", "answer", "label", "target")
"""The keys of an object that may hold its answer, in order of preference."""


def accepted(label: Any) -> tuple[str, ...]:
    """Return the acceptable answers of a label as texts; the answer must equal one of them.

    A float such as 1e-05 is accepted as ``0.00001`` too, because its row may have had that spelling.  Raises
    RewardFailed if there is no label, or if it is an object without one of ANSWER_KEYS.
    """
    return tuple(text for answer in answers(label) for text in _spellings(answer))


def answers(label: Any) -> tuple[Any, ...]:
    """Return the acceptable answers of a label as they are: texts and numbers.

    Raises RewardFailed if there is no label, or if it is an object without one of ANSWER_KEYS.
    """
    if label is None:
        raise RewardFailed("the row has no label")
    if isinstance(label, Mapping):
        return answers(_of_object(label))
    if isinstance(label, list | tuple):
        if not label:
            raise RewardFailed("the label is an empty list")
        return tuple(answer for item in label for answer in answers(item))
    return (label,)


def _spellings(answer: Any) -> tuple[str, ...]:
    text = str(answer)
    if isinstance(answer, float) and math.isfinite(answer) and "e" in text:
        return text, f"{Decimal(text):f}"
    return (text,)


def _of_object(label: Mapping[str, Any]) -> Any:
    for key in ANSWER_KEYS:
        if label.get(key) is not None:
            return label[key]
    keys = ", ".join(str(key) for key in label) or "no keys"
    raise RewardFailed(f"the label is an object with {keys}; the grader needs one of {', '.join(ANSWER_KEYS)}")
