"""The final answers by which majority@k counts the responses to one prompt."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.areas.rewards import BOXED
from asyncrl.rewards.graders.boxed import READ_BOXES, last_boxed
from asyncrl.rewards.graders.gpqa import named_letter
from asyncrl.rewards.graders.number import last_number
from asyncrl.types import Prompt

_LINE = re.compile(r"answer\s*:\s*(.+)", re.IGNORECASE)


def final_answer_of(rm_type: str | None, *, is_function: bool = False) -> Callable[[Prompt, str], str | None]:
    """Return a function that extracts the final answer from a response to a prompt, or None if its text has none.

    ``rm_type`` is the built-in reward, unless the prompt's row names another.  ``is_function``: a user's function
    grades all rows instead.
    """

    def final_answer(prompt: Prompt, text: str) -> str | None:
        name = "" if is_function else str(prompt.metadata.get("rm_type") or rm_type or "").strip()
        return _final_answer(name, text, prompt.metadata)

    return final_answer


def _final_answer(name: str, text: str, metadata: Mapping[str, Any]) -> str | None:
    bare, graded = name.removeprefix(BOXED), text
    if bare != name and bare not in READ_BOXES:
        in_box = last_boxed(text)
        if in_box is None:
            return None
        graded = in_box
    return _BY_TYPE.get(bare, _boxed_or_text)(graded, metadata)


def _boxed(text: str, metadata: Mapping[str, Any]) -> str | None:
    found = last_boxed(text)
    return None if found is None else _plain(found)


def _number(text: str, metadata: Mapping[str, Any]) -> str | None:
    found = last_number(text)
    return None if found is None else str(found.normalize() + 0)  # + 0 makes -0 a 0


def _answer_line(text: str, metadata: Mapping[str, Any]) -> str | None:
    lines = _LINE.findall(text)
    return _plain(lines[-1].strip("*$ ")) if lines else _boxed(text, metadata)


def _letter(text: str, metadata: Mapping[str, Any]) -> str | None:
    in_box = last_boxed(text)
    return named_letter(text if in_box is None else in_box, metadata)


def _whole(text: str, metadata: Mapping[str, Any]) -> str:
    return _plain(text)


def _boxed_or_text(text: str, metadata: Mapping[str, Any]) -> str | None:
    found = last_boxed(text)
    return _plain(text if found is None else found)


def _plain(text: str) -> str:
    return " ".join(text.split())


_BY_TYPE: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
    "number": _number,
    "exact": _whole,
    "math": _boxed,
    "deepscaler": _boxed,
    "dapo": _answer_line,
    "gpqa": _letter,
}
"""Functions by ``--rm-type``; any other reward counts the boxed answer, or the whole text of a response without one."""
