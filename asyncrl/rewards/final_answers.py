"""The final answers by which majority@k counts the responses to one prompt."""

import re
from collections.abc import Callable

from asyncrl.rewards.graders.boxed import last_boxed
from asyncrl.rewards.graders.number import last_number

_LETTER = re.compile(r"\b([A-Z])\b")
_LINE = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


def final_answer_of(rm_type: str | None) -> Callable[[str], str | None]:
    """Return a function that extracts the final answer from a response's text, or None if the text has none.

    ``rm_type`` is the built-in reward; None stands for a function.
    """
    return _BY_TYPE.get((rm_type or "").removeprefix("boxed_"), _boxed_or_text)


def _boxed(text: str) -> str | None:
    found = last_boxed(text)
    return None if found is None else _plain(found)


def _number(text: str) -> str | None:
    found = last_number(text)
    return None if found is None else str(found.normalize() + 0)  # + 0 makes -0 a 0


def _answer_line(text: str) -> str | None:
    lines = _LINE.findall(text)
    return _plain(lines[-1].strip("*$ ")) if lines else _boxed(text)


def _letter(text: str) -> str | None:
    in_box = last_boxed(text)
    letters = _LETTER.findall(in_box if in_box is not None else text)
    return letters[-1] if letters else None


def _boxed_or_text(text: str) -> str | None:
    found = last_boxed(text)
    return _plain(text if found is None else found)


def _plain(text: str) -> str:
    return " ".join(text.split())


_BY_TYPE: dict[str, Callable[[str], str | None]] = {
    "number": _number,
    "exact": _plain,
    "math": _boxed,
    "deepscaler": _boxed,
    "dapo": _answer_line,
    "gpqa": _letter,
}
"""Functions by ``--rm-type``; any other reward counts the boxed answer, or the whole text of a response without one."""
