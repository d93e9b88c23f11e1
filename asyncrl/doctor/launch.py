"""The training command in a launch script: its flags, its environment, and what starts it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from asyncrl.doctor.shell import Command, Shell
from asyncrl.doctor.words import Text

PROGRAMS = ("train.py", "train_async.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of the training command with the words behind it."""

    name: str
    """The flag without its leading dashes."""
    values: tuple[Text, ...]

    @property
    def written(self) -> str:
        """The flag as on a command line."""
        return " ".join((f"--{self.name}", *(value.value for value in self.values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The training command of a launch script, and its environment."""

    program: str
    """``train.py`` or ``train_async.py``."""
    place: str
    flags: tuple[Flag, ...]
    stray: tuple[str, ...]
    """Words before the first flag."""
    environment: Mapping[str, Text]
    """Variables that the script exports or gives to the training command."""
    notes: tuple[str, ...]


def find_launch(shell: Shell) -> Launch | None:
    """Return the last training command of a script, or None if it has none."""
    found = [(command, at) for command in shell.commands if (at := _program(command.words)) is not None]
    if not found:
        return None
    command, at = found[-1]
    flags, stray = _flags(command.words[at + 1 :])
    runtime, broken = _runtime_environment(command.words[:at])
    return Launch(
        program=PurePosixPath(command.words[at].value).name,
        place=command.place,
        flags=flags,
        stray=stray,
        environment={**shell.exported, **command.environment, **runtime},
        notes=(*broken, *_others(shell, found[:-1])),
    )


def _program(words: Sequence[Text]) -> int | None:
    """Return the place of the training program, behind a Python, among the words of a command."""
    places = (place for place, word in enumerate(words) if PurePosixPath(word.value).name in PROGRAMS)
    return next((place for place in places if any(_is_python(word) for word in words[:place])), None)


def _is_python(word: Text) -> bool:
    return PurePosixPath(word.value).name.startswith(("python", "torchrun", "uv"))


def _flags(words: Sequence[Text]) -> tuple[tuple[Flag, ...], tuple[str, ...]]:
    found: list[tuple[str, list[Text]]] = []
    stray: list[str] = []
    for word in words:
        if word.value.startswith("--"):
            name, equals, value = word.value[2:].partition("=")
            rest = [Text(value=value, unset=word.unset, unknown=word.unknown)] if equals else []
            found.append((name, rest))
        elif found:
            found[-1][1].append(word)
        else:
            stray.append(word.value)
    return tuple(Flag(name=name, values=tuple(values)) for name, values in found), tuple(stray)


def _runtime_environment(words: Sequence[Text]) -> tuple[dict[str, Text], list[str]]:
    """Return the variables in Ray's ``--runtime-env-json``, and one line if it is not JSON."""
    written = next(_values_of("--runtime-env-json", words), None)
    if written is None:
        return {}, []
    try:
        variables = json.loads(written.value).get("env_vars", {})
        return {str(name): Text(value=str(value)) for name, value in variables.items()}, []
    except (AttributeError, ValueError) as error:
        return {}, [f"--runtime-env-json is not read: {error}"]


def _values_of(name: str, words: Sequence[Text]) -> Iterator[Text]:
    for place, word in enumerate(words):
        if word.value.startswith(f"{name}="):
            yield Text(value=word.value[len(name) + 1 :], unset=word.unset, unknown=word.unknown)
        elif word.value == name and place + 1 < len(words):
            yield words[place + 1]


def _others(shell: Shell, training: Sequence[tuple[Command, int]]) -> Iterator[str]:
    """Yield one line for each other command that a user of asyncrl should know about."""
    for command, _ in training:
        yield f"{command.place}: another training command; only the last one is read"
    joins = [command.place for command in shell.commands if _joins(command)]
    if joins:
        yield (
            f"{', '.join(joins)}: other machines join a Ray cluster; asyncrl's launch scripts do that (docs/launch.md)"
        )


def _joins(command: Command) -> bool:
    text = " ".join(word.value for word in command.words)
    return "ray start" in text and "--address" in text
