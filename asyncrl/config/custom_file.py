"""The YAML file of ``--custom-config-path``: settings, and attributes of ``args`` in user functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.command_line import Given
from asyncrl.config.knobs import ALIASES, PASSED_THROUGH, Knob, knobs
from asyncrl.config.passthrough import flag_words, given_words, passed_through
from asyncrl.config.slime.table import TABLE
from asyncrl.config.values import UNREADABLE, WrongValue, from_flag, from_toml, unreadable
from asyncrl.errors import ConfigError


def read_custom(path: Path) -> tuple[Given, dict[str, Any]]:
    """Return the settings of the file, and its other keys with their values.

    Names have ``-`` or ``_``.  Relative paths are relative to the working directory, as in slime.  Raises ConfigError
    if the file is not YAML; wrong values are listed in ``mistakes``.
    """
    given = Given(values={}, passed={prefix: {} for prefix in PASSED_THROUGH}, foreign={}, mistakes=[])
    others: dict[str, Any] = {}
    for key, value in _mapping(path).items():
        name = ALIASES.get(key.replace("_", "-"), key.replace("_", "-"))
        try:
            if not _take(given, name, value):
                others[key] = value
        except WrongValue as error:
            given.mistakes.append(f"custom-config-path {path}: {key} {error}")
        except RecursionError as error:
            given.mistakes.append(f"custom-config-path {path}: {key}: {unreadable(error)}")
    return given, others


def _take(given: Given, name: str, value: Any) -> bool:
    """Add one key to ``given``.  False if it is neither a setting nor an accepted flag."""
    if name in knobs():
        given.values[name] = _converted(knobs()[name], value)
    elif target := passed_through(name):
        prefix, bare = target
        given_words(given.passed[prefix], bare, flag_words(value))
    elif name in TABLE and TABLE[name].is_read:
        given_words(given.foreign, name, flag_words(value))
    else:
        return False
    return True


def _converted(knob: Knob, value: Any) -> Any:
    """Convert a value of YAML 1.1, which reads 1e-6 as text."""
    if isinstance(value, str) and not knob.is_many:
        return from_flag(knob, value, Path.cwd())
    return from_toml(knob, value, Path.cwd())


def _mapping(path: Path) -> Mapping[str, Any]:
    import yaml  # most runs have no such file

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(f"custom-config-path {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"custom-config-path {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"custom-config-path {path}: not UTF-8 text; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"custom-config-path {path}: not YAML: {' '.join(str(error).split())}") from error
    except UNREADABLE as error:
        raise ConfigError(f"custom-config-path {path}: {unreadable(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"custom-config-path {path}: must be one mapping whose keys are names")
    return content
