"""The command line: flags and ``--help`` are generated from the settings."""

import argparse
import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.config.areas import Secret
from asyncrl.config.knobs import ALIASES, AREAS, PASSED_THROUGH, Knob, knobs, nearest
from asyncrl.config.passthrough import passed_through
from asyncrl.config.slime_flags import INSTEAD
from asyncrl.config.values import WrongValue, from_flag, shown
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The settings given by one source (command line or file), with one line for each mistake in it."""

    values: dict[str, Any]
    """The values by the setting's name."""
    passed: dict[str, dict[str, str | bool]]
    """The flags of other programs by prefix, then by bare name."""
    mistakes: list[str]


def read_flags(argv: Sequence[str]) -> tuple[Path | None, Given]:
    """Return the file given with ``--config`` and the other settings.  ``--help`` prints and exits."""
    own, passed = _split(argv)
    try:
        found, extra = parser().parse_known_args(own)
    except ConfigError as error:
        return None, Given(values={}, passed=passed, mistakes=[str(error)])
    texts = vars(found)
    config = texts.pop("config", None)
    values, mistakes = {}, _stray(extra)
    for name, text in texts.items():
        try:
            values[name] = from_flag(knobs()[name], text, Path.cwd())
        except WrongValue as error:
            mistakes.append(f"--{name} {error}")
    return Path(config) if config else None, Given(values=values, passed=passed, mistakes=mistakes)


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The argument parser.  Its result has only flags that were given, as unconverted strings."""
    root = _Parser(
        usage="%(prog)s [--config FILE.toml] [--any-flag value ...]",
        description="Asynchronous RL training: SGLang generates while Megatron trains. Flags override the TOML file.",
        epilog="Any other --sglang-FLAG is passed to the SGLang server, any other --router-FLAG to sglang-router.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    root.add_argument(
        "--config",
        metavar="FILE.toml",
        help="TOML file of settings; keys are the names of the flags below, without dashes in front.",
    )
    groups = {area: root.add_argument_group(_title(cls)) for area, cls in AREAS.items()}
    for knob in knobs().values():
        _add(groups[knob.area], knob)
    return root


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _add(group: argparse._ArgumentGroup, knob: Knob) -> None:
    names = [f"--{knob.name}", *(f"--{alias}" for alias, name in ALIASES.items() if name == knob.name)]
    text = (knob.help + _default(knob)).replace("%", "%%")
    if knob.type is bool:
        group.add_argument(*names, dest=knob.name, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = "{" + ",".join(knob.choices) + "}" if knob.choices else _METAVARS[knob.type]
    nargs = "*" if knob.is_many else None
    metavar = "NAME PATH" if knob.name == "eval-prompt-data" else metavar
    group.add_argument(*names, dest=knob.name, nargs=nargs, metavar=metavar, help=text)


_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", Secret: "TEXT"}


def _title(cls: type[Any]) -> str:
    return (cls.__doc__ or "").splitlines()[0].removesuffix(".")


def _default(knob: Knob) -> str:
    if knob.default is MISSING:
        return "  (required)"
    if knob.default is None or knob.default == ():
        return ""
    return f"  (default: {shown(knob.default) if knob.type is bool else knob.default})"


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, str | bool]]]:
    own: list[str] = []
    passed: dict[str, dict[str, str | bool]] = {prefix: {} for prefix in PASSED_THROUGH}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        target = passed_through(name) if word.startswith("--") else None
        if target is None:
            own.append(word)
            continue
        prefix, bare = target
        if not equals and words and not words[0].startswith("--"):
            passed[prefix][bare] = words.pop(0)
        else:
            passed[prefix][bare] = text if equals else True
    return own, passed


def _stray(extra: Sequence[str]) -> list[str]:
    """One line per word before the first flag, and one per unknown flag, which covers the words that follow it."""
    words = itertools.takewhile(lambda word: not _is_flag(word), extra)
    names = [word.partition("=")[0] for word in extra if _is_flag(word)]
    return [
        f"unexpected word {shown(word)}: every setting is a flag; put --config or a flag's name before it"
        for word in words
    ] + [unknown("flag", name, name.lstrip("-"), "--") for name in names]


def _is_flag(word: str) -> bool:
    return re.match(r"--?[A-Za-z]", word) is not None


def unknown(what: str, written: str, name: str, dashes: str = "") -> str:
    """The error line for an unknown name: ``unknown flag --batchsize; did you mean --batch-size?``.

    For a flag of slime or Megatron it names the replacement.
    """
    if (instead := INSTEAD.get(name)) is not None:
        return f"unknown {what} {written} (of slime or Megatron); {instead}"
    negated = {f"no-{knob.name}" for knob in knobs().values() if knob.type is bool} if dashes else set()
    guess = nearest(name, {*knobs(), *ALIASES, *negated})
    return f"unknown {what} {written}" + (f"; did you mean {dashes}{guess}?" if guess else "")
