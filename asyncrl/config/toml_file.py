"""The TOML file of a run: flat, its keys are the names of the flags."""

import re
import tomllib
from pathlib import Path
from typing import Any

from asyncrl.config.flags import Given, unknown
from asyncrl.config.knobs import ALIASES, PASSED_THROUGH, knobs
from asyncrl.config.passthrough import as_flag_text, passed_through
from asyncrl.config.values import WrongValue, absolute, from_toml
from asyncrl.errors import ConfigError


def read_toml(path: Path) -> Given:
    """Every setting of the file.  Relative paths in it start at its folder.

    Raises ConfigError if it cannot be read at all; wrong keys and values are its mistakes.
    """
    folder = absolute(path, Path.cwd()).parent
    given = Given(values={}, passed={prefix: {} for prefix in PASSED_THROUGH}, mistakes=[])
    for key, value in _table(path).items():
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
            raise ConfigError(f"{key} is another name of a key that is there already")
        given.values[name] = from_toml(knobs()[name], value, folder)
    elif target := passed_through(name):
        prefix, bare = target
        text = as_flag_text(value)
        if text is not False:
            given.passed[prefix][bare] = text
    elif isinstance(value, dict):
        raise ConfigError(f"[{key}] is a table; keys are flat, named like the flags")
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
        raise ConfigError(f"{path}: not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        text, line = str(error).replace("Cannot overwrite a value", "a key is there twice"), ""
        if found := re.search(r" \(at line (\d+), column (\d+)\)$", text):
            text, line = f"{text[: found.start()]}, column {found[2]}", f":{found[1]}"
        raise ConfigError(f"{path}{line}: not TOML: {text}") from error
