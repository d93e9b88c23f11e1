"""Equality of mathematical answers.

Two answers are equal if they have one spelling, or if ``math-verify`` proves them equal element by element.  Two rules
of DeepScaleR's grader (Luo et al. 2025) hold: a fraction must be reduced as in the label, and an integer must be
written as an integer.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from asyncrl.rewards.graders import proofs
from asyncrl.rewards.graders.boxed import last_boxed, without_box
from asyncrl.rewards.graders.labels import accepted
from asyncrl.rewards.graders.plain_math import spelled

MOST_SPELLED = 10_000
"""Characters of an answer, at most, whose spelling is compared; a longer one must be the label's text."""
MOST_CHARACTERS = 600
"""Characters of an answer, at most, that is read as an expression; a longer one must have the label's spelling."""

_MIXED = re.compile(r"(\d+)\+(\d+/\d+)")
_INTEGER = re.compile(r"[+-]?\d+")
_FRACTION = re.compile(r"-?\(?-?\d+\)?/\(?\d*[1-9]\d*\)?")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_KNOWN = re.compile(
    r"sqrt|log|ln|sin|cos|tan|cot|sec|csc|exp|arcsin|arccos|arctan|inf|pi|theta|alpha|beta|begin|end|[pbv]?matrix"
)
_BIG_POWER = re.compile(r"(?:\^|\*\*)\s*[{(]?\s*-?\d{3,}|\^[^+*/,-]*\^|!\s*!|\d{4,}\s*!")


def boxed_equals(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the last ``\\boxed{}`` of the answer equals the label, else 0.0.

    Raises RewardFailed if the row has no label.
    """
    given = last_boxed(response)
    return float(given is not None and equals_any(given, accepted(label)))


def after_thinking(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return ``boxed_equals`` of the text after the last ``</think>``, or else after the first ``###Response``.

    An answer with neither mark scores 0.0.  Raises RewardFailed if the row has no label.
    """
    for text in (response.split("</think>")[1:][-1:], response.split("###Response")[1:2]):
        if text:
            return boxed_equals(text[0], label, metadata)
    accepted(label)
    return 0.0


def equals_any(given: str, labels: tuple[str, ...]) -> bool:
    """Return whether an answer equals one of the labels; a label may be in a ``\\boxed{}``."""
    wanted = [without_box(label) for label in labels]
    return any(is_equal(given, label) for label in wanted if label)


def is_equal(given: str, wanted: str) -> bool:
    """Return whether two answers are equal.

    Raises nothing on the main thread.  Raises RewardFailed in another thread, if the process that proves for threads
    cannot start or dies.
    """
    given, wanted = " ".join(given.split()), " ".join(wanted.split())
    if given == wanted:
        return True
    if max(len(given), len(wanted)) > MOST_SPELLED:
        return False
    one, other = spelled(given), spelled(wanted)
    if one == other:
        return bool(one)
    if not one or not other:
        return False
    lists = spelled(given, is_list=True), spelled(wanted, is_list=True)
    if lists != (one, other) and _is_same_list(*lists):
        return True
    if max(len(given), len(wanted)) > MOST_CHARACTERS:
        return False
    ones, others = _elements(one), _elements(other)
    if len(ones) != len(others):
        return len(others) > 1 and "\\pm" in given and _is_proven(given, wanted)
    if len(others) == 1:
        return _is_same_element(one, other, given, wanted)
    return _are_same_elements(one, other)


def _is_same_list(one: str, other: str) -> bool:
    """Return whether two spellings are one, or lists with equal elements: ``(100, 200)`` and ``(100,200)`` are."""
    if one == other:
        return True
    if max(len(one), len(other)) > MOST_CHARACTERS:
        return False
    return 1 < len(_elements(one)) == len(_elements(other)) and _are_same_elements(one, other)


def _are_same_elements(one: str, other: str) -> bool:
    """Return whether two lists of one length have equal elements and equal brackets."""
    if _brackets(one) != _brackets(other):
        return False
    pairs = zip(_elements(one), _elements(other), strict=True)
    return all(_is_same_element(each, label, each, label) for each, label in pairs)


def _elements(text: str) -> list[str]:
    """Return the elements of a tuple, an interval, or a list without brackets; anything else is one element."""
    if "," in text and not re.search(r"[()\[\]{}]", text):
        return text.split(",")
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not re.search(r"[()\[\]]", inner):
        return inner.split(",")
    return [text]


def _brackets(text: str) -> str:
    return (text[0] + text[-1]) if text[0] in "([" else ""


def _is_same_element(one: str, other: str, given: str, wanted: str) -> bool:
    if one == other:
        return True
    if _FRACTION.fullmatch(one) and _FRACTION.fullmatch(other):
        return _parts(one) == _parts(other)
    if (_INTEGER.fullmatch(one) is None) != (_INTEGER.fullmatch(other) is None):
        return False
    values = _value(one), _value(other)
    if None not in values:
        return values[0] == values[1]
    return _is_proven(given, wanted)


def _parts(fraction: str) -> tuple[str, ...]:
    return tuple(re.findall(r"-|\d+", fraction))


def _value(text: str) -> Fraction | None:
    """Return the exact value of an integer, a decimal or a fraction; None for anything else."""
    if _DECIMAL.fullmatch(text) and len(text) < 1000:
        return Fraction(text)
    if (mixed := _MIXED.fullmatch(text)) and (part := _value(mixed[2])) is not None:
        return int(mixed[1]) + part
    if _FRACTION.fullmatch(text) and len(text) < 1000:
        return Fraction(re.sub(r"[()]", "", text))
    return None


def _is_proven(given: str, wanted: str) -> bool:
    """Return whether math-verify may read both answers, and finds them equal in time."""
    if not _is_expression(given) or not _is_expression(wanted):
        return False
    return proofs.is_proven(_latex(given), _latex(wanted))


def _is_expression(text: str) -> bool:
    """Return whether math-verify may read the text: no prose, and no power or factorial that takes minutes."""
    words = re.findall(r"[a-zA-Z]{3,}", _KNOWN.sub(" ", spelled(text)))
    return not words and ":" not in text and not _BIG_POWER.search(text)


def _latex(text: str) -> str:
    text = re.sub(r"(?<!\\)\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text.replace("$", ""))
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    return re.sub(r"(?<![\\a-zA-Z])inf(?![a-zA-Z])", r"\\infty ", text).replace("**", "^")
