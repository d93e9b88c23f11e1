"""The reward for an answer whose last number equals the label."""

import re
from decimal import Decimal

from asyncrl.errors import RewardFailed
from asyncrl.rewards.labels import label_text
from asyncrl.types import Prompt, Sample

# After a word, a number or a closing bracket, "-" is a minus operator or a hyphen, not a sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}])[-\u2212])?[$\u20ac\u00a3]?"
    r"(?P<size>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][+-]?[0-9]{1,3}(?![0-9]))?"
)


async def same_number(prompt: Prompt, sample: Sample) -> float:
    """Return 1.0 if the last number of the answer equals the last number of the label, else 0.0.

    Raises RewardFailed if the row has no label or the label has no number.
    """
    wanted = last_number(label_text(prompt))
    if wanted is None:
        raise RewardFailed(f"row {prompt.row}: there is no number in the label {prompt.label!r}")
    return float(last_number(sample.text) == wanted)


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; ``1,234.50`` is one number, ``1, 2`` and ``3-4`` are two numbers each."""
    every = list(_NUMBER.finditer(text))
    if not every:
        return None
    found = every[-1]
    size = Decimal(found["size"].replace(",", "") + (found["exponent"] or ""))
    return size.copy_negate() if found["sign"] else size
