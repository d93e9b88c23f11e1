"""The reward of DAPO (Yu et al. 2025): the line ``Answer: X`` at the end of the response must be the label."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from asyncrl.rewards.graders.labels import accepted

TAIL = 300
"""Characters at the end of the answer in which its last line is searched."""
NO_ANSWER = "[INVALID]"
"""The prediction of an answer without the line."""
MOST_DIGITS = 1000
"""Digits of a label that is written as an integer, at most; ``1e999999`` would have a million."""

_LINE = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)

# The normalisation of final answers by Lewkowycz et al. 2022 (Minerva), appendix D.1, with its word list.
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_DROPPED = (
    *(["square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"]),
    r"\ldots",
    *(
        [
            "sue",
            "points",
            "feet",
            "minutes",
            "digits",
            "cents",
            "degrees",
            "cm",
            "gm",
            "pounds",
            "meters",
            "meals",
            "edges",
            "students",
        ]
    ),
    *(["childrentickets", "multiples"]),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots", "<|im_end|>", "<|endoftext|>"),
)
_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    *((re.compile(rf"\\{name}\{{(.*?)\}}"), r"\1") for name in ("text", "textbf", "overline")),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def answer_line(response: str, label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``score`` (1.0 or -1.0), ``acc`` (True or False) and ``pred``, the normalised answer of the last line.

    Raises RewardFailed if the row has no label.
    """
    lines = _LINE.findall(response[-TAIL:])
    given = normalised(lines[-1] if lines else NO_ANSWER)
    is_right = given in [_wanted(answer) for answer in accepted(label)]
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": given}


def normalised(answer: str) -> str:
    """Return the answer after the last ``=``, without units, dollar signs, LaTeX markup and commas in numbers."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _DROPPED:
        text = text.replace(word, "")
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def _wanted(label: str) -> str:
    """Return the normalised label; ``7.0`` is ``7``, and a label that is no integer stays as it is."""
    text = normalised(label)
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    if not number.is_finite() or number.adjusted() >= MOST_DIGITS:
        return text
    return str(int(number)) if number == int(number) else text
