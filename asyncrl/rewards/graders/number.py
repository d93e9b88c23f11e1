"""The reward for an answer whose last number equals the label."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders.labels import accepted

# After a word, a number or a closing bracket, "-" is a minus operator or a hyphen, not a sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}])[-\u2212])?[$\u20ac\u00a3]?"
    r"(?P<size>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)


def same_number(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the last number of the answer equals the last number of the label, else 0.0.

    Raises RewardFailed if the row has no label or the label has no number.
    """
    wanted = [last_number(answer) for answer in accepted(label)]
    if None in wanted:
        raise RewardFailed(f"there is no number in the label {label!r}")
    return float(last_number(response) in wanted)


_TAIL = 400
"""Characters at the end of a text that are searched first; a whole long text takes milliseconds."""


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; ``1,234.50`` is one number, ``1, 2`` and ``3-4`` are two numbers each."""
    found = _last_match(text)
    if found is None:
        return None
    size = Decimal(found["size"].replace(",", "") + (found["exponent"] or ""))
    return size.copy_negate() if found["sign"] else size


def _last_match(text: str) -> re.Match[str] | None:
    tail = text[-_TAIL:]
    found = list(_NUMBER.finditer(tail))[-1:]
    # With a space before it in the tail, the match does not depend on the text before the tail.
    if len(tail) < len(text) and not (found and " " in tail[: found[0].start() - 1]):
        found = list(_NUMBER.finditer(text))[-1:]
    return found[0] if found else None
