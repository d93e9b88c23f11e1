"""The command line of settings that are Python values."""

import os
from collections.abc import Mapping, Sequence
from numbers import Real

from asyncrl.config.knobs import knobs
from asyncrl.errors import ConfigError


def flag_words(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Return the words of a command line.  None leaves a setting out.

    Raises ConfigError for a value that no flag can have.
    """
    return tuple(word for name, value in settings.items() for word in _words(name, value))


def _words(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool) and name in knobs() and knobs()[name].type is bool:
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [f"--{name}", *(_text(name, each) for each in value)]
    return [f"--{name}={_text(name, value)}"]  # one word: a value may begin with a dash


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Real):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise ConfigError(f"{name} must be text, a number, a path, true, false or a list of these, got {value!r}")
