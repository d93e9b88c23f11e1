"""The command line: flags and ``--help`` are generated from the settings."""

import argparse
import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.config.areas import FlagWords, Secret
from asyncrl.config.knobs import ALIASES, AREAS, PASSED_THROUGH, Knob, knobs, nearest
from asyncrl.config.passthrough import given_words, passed_through
from asyncrl.config.slime.status import FlagStatus, Kind
from asyncrl.config.slime.table import TABLE
from asyncrl.config.values import WrongValue, from_flag, is_utf8, shown
from asyncrl.errors import ConfigError

NONE = "none"
"""The word for no number, which takes back that of a TOML file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The settings given by one source (command line or file), with one line for each mistake in it."""

    values: dict[str, Any]
    """The values by the setting's name."""
    passed: dict[str, dict[str, FlagWords]]
    """The flags of other programs by prefix, then by bare name."""
    foreign: dict[str, FlagWords]
    """The flags of slime and Megatron that are accepted without a setting, by name."""
    mistakes: list[str]


def read_flags(argv: Sequence[str]) -> tuple[Path | None, Given]:
    """Return the file given with ``--config`` and the other settings.  ``--help`` prints and exits."""
    given = Given(values={}, passed={prefix: {} for prefix in PASSED_THROUGH}, foreign={}, mistakes=[])
    if strange := [word for word in argv if not is_utf8(word)]:
        given.mistakes.extend(f"an argument must be UTF-8 text, got {word!a}" for word in strange)
        return None, given
    try:
        found, extra = parser().parse_known_args(_split(argv, given))
    except ConfigError as error:
        given.mistakes.append(str(error))
        return None, given
    texts = vars(found)
    config = texts.pop("config", None)
    given.mistakes.extend(_stray(extra))
    for name, text in texts.items():
        try:
            given.values[name] = _value(knobs()[name], text)
        except WrongValue as error:
            given.mistakes.append(f"--{name} {error}")
    return Path(config) if config else None, given


def _value(knob: Knob, given: str | bool | Sequence[str]) -> Any:
    """Return the value of a flag, or None if it takes back the file's number.  Raises WrongValue."""
    if given == NONE and knob.default is None and knob.type in (int, float):
        return None
    return from_flag(knob, given, Path.cwd())


@functools.cache
def parser() -> argparse.ArgumentParser:
    """The argument parser.  Its result has only flags that were given, as unconverted strings."""
    root = _Parser(
        usage="%(prog)s [--config FILE.toml] [--any-flag value ...]",
        description="Asynchronous RL training: SGLang generates while Megatron trains. Flags override the TOML file.",
        epilog=f"The word {NONE} takes back a number of the TOML file that may be left out. "
        "Any other --sglang-FLAG is passed to the SGLang server, any other --router-FLAG to sglang-router.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    root.add_argument(
        "--config",
        metavar="FILE.toml",
        help="TOML file of settings; keys are the names of the flags below, without dashes in front.",
    )
    first = root.add_argument_group("The flags that matter most")
    for name in FIRST:
        _add(first, knobs()[name])
    groups = {area: root.add_argument_group(_title(cls)) for area, cls in AREAS.items()}
    for knob in knobs().values():
        if knob.name not in FIRST:
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
    metavar = "NAME PATH" if knob.name == "eval-prompt-data" else metavar
    if knob.is_many:
        action = "store" if knob.name in LAST_COUNTS else "extend"
        group.add_argument(*names, dest=knob.name, nargs="*", action=action, metavar=metavar, help=text)
    else:
        group.add_argument(*names, dest=knob.name, metavar=metavar, help=text)


FIRST = (
    "hf-checkpoint",
    "prompt-data",
    "input-key",
    "label-key",
    "apply-chat-template",
    "rm-type",
    "custom-rm-path",
    "num-rollout",
    "rollout-batch-size",
    "n-samples-per-prompt",
    "rollout-max-response-len",
    "max-staleness",
    "update-weights-interval",
    "dynamic-sampling-filter-path",
    "actor-num-gpus-per-node",
    "rollout-num-gpus",
    "lr",
    "eval-prompt-data",
    "save",
    "dry-run",
)
"""Flags that ``--help`` shows before all others: what a first run of one's own needs."""

LAST_COUNTS = frozenset({"prompt-data"})
"""Flags that replace what the same flag gave before.  Every other repeated flag of a list adds to its list.

slime's scripts append another ``--prompt-data`` in order to change it.
"""

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", Secret: "TEXT"}


def _title(cls: type[Any]) -> str:
    return (cls.__doc__ or "").splitlines()[0].removesuffix(".")


def _default(knob: Knob) -> str:
    if knob.default is MISSING:
        return "  (required)"
    if knob.default is None or knob.default == ():
        return ""
    return f"  (default: {shown(knob.default) if knob.type is bool else knob.default})"


def _split(argv: Sequence[str], given: Given) -> list[str]:
    """Add the flags of other programs, of slime and of Megatron to ``given``, and return the other words."""
    own: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        row = TABLE.get(name)
        target = passed_through(name)
        if not word.startswith("--") or (target is None and (row is None or not row.is_read)):
            own.append(word)
            continue
        followed = [text] if equals else _followed(words, row)
        del words[: 0 if equals else len(followed)]
        if target is not None:
            prefix, bare = target
            given_words(given.passed[prefix], bare, followed)
        elif row is not None:
            _read(given, row, followed)
    return own


def _followed(words: Sequence[str], row: FlagStatus | None) -> list[str]:
    """The words that belong to a flag which ``words`` follow: all up to the next flag, or as many as ``row`` takes."""
    most = {"none": 0, "one": 1, "many": None}[row.words] if row else None
    return list(itertools.takewhile(lambda word: not word.startswith("--"), words))[:most]


def _read(given: Given, row: FlagStatus, followed: Sequence[str]) -> None:
    if row.words != "none" and not followed:
        given.mistakes.append(f"--{row.name}: expected {'one argument' if row.words == 'one' else 'arguments'}")
    else:
        given_words(given.foreign, row.name, followed)


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
    row = TABLE.get(name)
    if row is not None and row.kind is Kind.NOT_HERE:
        return f"{written} (of slime or Megatron) is not here: {row.text}"
    negated = {f"no-{knob.name}" for knob in knobs().values() if knob.type is bool} if dashes else set()
    guess = nearest(name, {*knobs(), *ALIASES, *negated})
    return f"unknown {what} {written}" + (f"; did you mean {dashes}{guess}?" if guess else "")
