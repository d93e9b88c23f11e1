"""Sampling parameters of SGLang that the engines get as they are, with a check of their values.

SGLang raises TypeError at an unknown name, and at a text where it compares numbers.  That breaks a streamed answer off,
so the engine seems to be lost.
"""

import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values that a setting may have, in words, and their check."""

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_pattern(value: object) -> bool:
    """Return whether the value is a regular expression.  SGLang reads it as ``re`` does; an error ends the answer."""
    if not isinstance(value, str):
        return False
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _are_patterns(value: object) -> bool:
    return all(map(_is_pattern, value if isinstance(value, list | tuple) else [value]))


def _are_numbers(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


_NUMBER = _Kind("a number", _is_number)
_TEXT = _Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "")
FURTHER_SETTINGS: Mapping[str, _Kind] = {
    "min_p": _NUMBER,
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "json_schema": _TEXT,
    "regex": _TEXT,
    "ebnf": _TEXT,
    "structural_tag": _TEXT,
    "ignore_eos": _Kind("true or false", lambda value: isinstance(value, bool)),
    "stop_regex": _Kind("a regular expression or a list of them", _are_patterns),
    "logit_bias": _Kind("an object of numbers by token id", _are_numbers),
    "custom_params": _Kind("a JSON value", lambda value: True),
}
"""The parameters of SGLang 0.5.16 besides those of ``SamplingParams``.

``n`` is not among them: it would put the tokens of several answers in one stream.
"""


def check_further(extra: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of the wrong type.  None stands for SGLang's default."""
    for name, value in extra.items():
        kind = FURTHER_SETTINGS.get(name)
        if kind is not None and value is not None and not kind.fits(value):
            raise ValueError(f"{name} must be {kind.words}, got {value!r:.80}")
