"""The conversion of one value: from a flag's text or from TOML to its field's type, and back to TOML text."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.areas import Secret
from asyncrl.config.knobs import Knob
from asyncrl.errors import first_line

KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    bool: "true or false",
    Secret: "text",
}
"""The name of a value of each type in error lines."""

UNREADABLE = (ValueError, LookupError, AttributeError, RecursionError)
"""The errors of the parsers of TOML and YAML for text that has a right form and no value, such as ``2024-02-30``."""

LARGEST = 2**63
"""The limit of whole numbers, above which no setting has a meaning."""
MOST_BYTES = {"a path": 4095, "a name in it": 255}
"""The limits of Linux."""


class WrongValue(ValueError):
    """The error for a wrong value.  Its message says what the value must be and what it is, not which setting."""


def from_flag(knob: Knob, given: str | bool | Sequence[str], folder: Path) -> Any:
    """Convert the value of a flag.  Relative paths are relative to ``folder``."""
    if knob.is_many:
        return _located(knob, tuple(_from_text(knob, text) for text in given), folder)  # type: ignore[union-attr]
    return _located(knob, _from_text(knob, given) if isinstance(given, str) else given, folder)


def from_toml(knob: Knob, given: Any, folder: Path) -> Any:
    """Convert the value of a TOML key.  Relative paths are relative to ``folder``."""
    if not knob.is_many:
        return _located(knob, _from_typed(knob, given), folder)
    if knob.type is Path and not isinstance(given, list):
        given = [given]
    if not isinstance(given, list):
        raise WrongValue(f"must be a list, got {shown(given)}")
    return _located(knob, tuple(_from_typed(knob, item) for item in given), folder)


def shown(value: Any) -> str:
    """Format ``value`` as TOML."""
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has no bare DEL
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(item) for item in value)}]"
    return str(value)


def unreadable(error: Exception) -> str:
    """The reason for one of ``UNREADABLE``, for an error line."""
    if isinstance(error, RecursionError):
        return "nested too deeply, or a table contains itself"
    return f"a value cannot be read: {first_line(error)}"


def absolute(path: str | Path, folder: Path) -> Path:
    """Make ``path`` absolute without following links, so that it keeps its given name.  Raises WrongValue."""
    try:
        full = Path(os.path.abspath(folder / Path(path).expanduser()))
    except RuntimeError:
        raise WrongValue(f"must be a path, got {shown(path)}: there is no such user") from None
    if not is_utf8(str(full)):
        raise WrongValue(f"must be UTF-8 text, got {str(full)!a}")
    if "\0" in str(full):
        raise WrongValue(f"must be a path, got {shown(path)}, which contains a null character")
    sizes = {"a path": len(os.fsencode(full)), "a name in it": max(len(os.fsencode(part)) for part in full.parts)}
    for part, size in sizes.items():
        if size > MOST_BYTES[part]:
            raise WrongValue(f"is too long: {part} has at most {MOST_BYTES[part]} bytes, got {size}")
    return full


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can encode the text.  Python keeps other bytes of an argument as surrogates, which it cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _from_text(knob: Knob, text: str) -> Any:
    if knob.type not in (int, float):
        return _from_typed(knob, text)
    try:
        number = knob.type(text)
    except ValueError:
        raise WrongValue(f"must be {KINDS[knob.type]}, got {shown(text)}") from None
    return _checked(knob, number)


def _from_typed(knob: Knob, given: Any) -> Any:
    wanted = str if knob.type in (Path, Secret) else knob.type
    if wanted is float and isinstance(given, int) and not isinstance(given, bool):
        given = _as_float(given)
    if not isinstance(given, wanted) or (wanted is int and isinstance(given, bool)):
        raise WrongValue(f"must be {KINDS[knob.type]}, got {shown(given)}")
    return _checked(knob, given)


def _as_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        raise WrongValue("must be a finite number, got a whole number of more than 308 digits") from None


def _checked(knob: Knob, value: Any) -> Any:
    if knob.choices and value not in knob.choices:
        raise WrongValue(f"must be one of {', '.join(knob.choices)}, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise WrongValue(f"must be a finite number, got {value}")
    if knob.type is int and abs(value) >= LARGEST:
        raise WrongValue("must be below 2**63 in size")
    if isinstance(value, str) and not is_utf8(value):
        raise WrongValue(f"must be UTF-8 text, got {value!a}")
    if knob.type is Path and not value:
        raise WrongValue("must be a path, got an empty text")
    return value


def _located(knob: Knob, value: Any, folder: Path) -> Any:
    if knob.type is Path and knob.is_many:
        return tuple(absolute(path, folder) for path in value)
    if knob.type is Path:
        return absolute(value, folder)
    if knob.type is Secret:
        return Secret(value)
    if knob.name == "eval-prompt-data":
        return tuple(str(absolute(word, folder)) if place % 2 else word for place, word in enumerate(value))
    if _names_function(knob) and value.endswith(".py") and ":" not in value:
        return str(absolute(value, folder))
    if _names_function(knob):
        file, ending, function = value.partition(".py:")  # split at .py: only, because the arguments may contain colons
        return f"{absolute(file, folder)}{ending}{function}" if ending and ":" not in file else value
    return value


def _names_function(knob: Knob) -> bool:
    """Whether a setting may hold file.py:function."""
    return knob.type is str and not knob.is_many and knob.name.endswith("-path")
