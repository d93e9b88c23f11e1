"""The final answers by which majority@k counts the responses to one prompt."""

import re
from collections.abc import Callable

from asyncrl.rewards.number import last_number

_END = 2000
"""Characters at the end of a text that are searched for a number first: a whole text of 50,000 takes milliseconds."""
_BOXED = re.compile(r"\\f?boxed\s*\{")
_LETTER = re.compile(r"\b([A-Z])\b")
_LINE = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


def final_answer_of(rm_type: str | None) -> Callable[[str], str | None]:
    """Return a function that extracts the final answer from a response's text, or None if the text has none.

    ``rm_type`` is the built-in reward; None stands for a function.
    """
    return _BY_TYPE.get((rm_type or "").removeprefix("boxed_"), _boxed_or_text)


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with balanced braces, or None."""
    for found in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for place in range(found.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return _plain(text[found.end() : place])
    return None


def _number(text: str) -> str | None:
    found = last_number(text[-_END:])
    found = last_number(text) if found is None else found
    return None if found is None else str(found.normalize() + 0)  # + 0 makes -0 a 0


def _answer_line(text: str) -> str | None:
    lines = _LINE.findall(text)
    return _plain(lines[-1].strip("*$ ")) if lines else boxed(text)


def _letter(text: str) -> str | None:
    in_box = boxed(text)
    letters = _LETTER.findall(in_box if in_box is not None else text)
    return letters[-1] if letters else None


def _boxed_or_text(text: str) -> str | None:
    found = boxed(text)
    return _plain(text) if found is None else found


def _plain(text: str) -> str:
    return " ".join(text.split())


_BY_TYPE: dict[str, Callable[[str], str | None]] = {
    "number": _number,
    "exact": _plain,
    "math": boxed,
    "deepscaler": boxed,
    "dapo": _answer_line,
    "gpqa": _letter,
}
"""Functions by ``--rm-type``; any other reward counts the boxed answer, or the whole text of a response without one."""
