"""The TOML file of a run: a flat table whose keys are the names of the flags."""

import re
import tomllib
from pathlib import Path
from typing import Any

from asyncrl.config.command_line import Given, unknown
from asyncrl.config.knobs import ALIASES, PASSED_THROUGH, knobs
from asyncrl.config.passthrough import flag_words, given_words, passed_through
from asyncrl.config.slime.table import TABLE
from asyncrl.config.values import UNREADABLE, WrongValue, from_toml, unreadable
from asyncrl.errors import ConfigError


def read_toml(path: Path) -> Given:
    """Return every setting of the file.  Relative paths in it are relative to its folder.

    Raises ConfigError if the file cannot be read or parsed; wrong keys and values are listed in ``mistakes``.
    """
    table, folder = _table(path), path.absolute().parent
    given = Given(values={}, passed={prefix: {} for prefix in PASSED_THROUGH}, foreign={}, mistakes=[])
    for key, value in table.items():
        try:
            _take(given, key, value, folder)
        except WrongValue as error:
            given.mistakes.append(f"{path}: {key} {error}")
        except ConfigError as error:
            given.mistakes.append(f"{path}: {error}")
    return given


def _take(given: Given, key: str, value: Any, folder: Path) -> None:
    name = ALIASES.get(key, key)
    if name in knobs():
        if name in given.values:
            raise ConfigError(f"{key}: the setting {name} is given under two names; leave one of them out")
        given.values[name] = from_toml(knobs()[name], value, folder)
    elif target := passed_through(name):
        prefix, bare = target
        given_words(given.passed[prefix], bare, flag_words(value))
    elif name in TABLE and TABLE[name].is_read:
        given_words(given.foreign, name, flag_words(value))
    elif isinstance(value, dict):
        raise ConfigError(f"[{key}] is a table; write its keys at the top level, named like the flags")
    else:
        raise ConfigError(unknown("key", key, key))


def _table(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        text, line = str(error).replace("Cannot overwrite a value", "a key is given twice"), ""
        if found := re.search(r" \(at line (\d+), column (\d+)\)$", text):
            text, line = f"{text[: found.start()]}, column {found[2]}", f":{found[1]}"
        raise ConfigError(f"{path}{line}: not TOML: {text}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path}: {unreadable(error)}") from error
