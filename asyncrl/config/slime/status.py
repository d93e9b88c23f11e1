"""The status of a flag, and the ways to write one down."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Kind(StrEnum):
    """The four answers to: does asyncrl have this flag?"""

    DONE = "done"
    """A setting of a run with slime's meaning, or a flag that is passed on."""
    TRUE_ANYWAY = "true anyway"
    """Accepted where the run does it already.  Any other value is an error."""
    DIFFERENT = "different"
    """Accepted.  The setting differs in its default or meaning, or the run does it in another way, with a note."""
    NOT_HERE = "not here"
    """An error that names the replacement or the reason."""


Arity = Literal["none", "one", "many"]
"""The number of words that follow a flag on the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagStatus:
    """The status of one flag."""

    name: str
    """The flag without its leading dashes."""
    kind: Kind
    text: str
    """The reason, the difference, or the replacement, as error lines, notes and docs/slime.md show it."""
    setting: str | None = None
    """The setting that the flag sets; None for every flag that is not a setting."""
    words: Arity = "one"
    """The words of an accepted flag that is not a setting."""
    accepted: tuple[str, ...] = ()
    """The values that are true anyway; empty if the model or other settings decide, or if any value is accepted."""
    is_compared: bool = False
    """Whether the flag describes the model, and is compared with its config.json."""

    @property
    def is_read(self) -> bool:
        """Whether the flag is accepted although it is not a setting."""
        return self.setting is None and self.kind in (Kind.TRUE_ANYWAY, Kind.DIFFERENT)


Rows = tuple[FlagStatus, ...]


def of_model(text: str, *names: str, words: Arity = "one") -> Rows:
    """Rows for flags that describe the model: true anyway if config.json says the same."""
    return tuple(
        FlagStatus(name=name, kind=Kind.TRUE_ANYWAY, text=text, words=words, is_compared=True) for name in names
    )


def true_anyway(text: str, *names: str, words: Arity = "none", accepted: tuple[str, ...] = ()) -> Rows:
    """Rows for flags that ask for what the run does already."""
    return tuple(
        FlagStatus(name=name, kind=Kind.TRUE_ANYWAY, text=text, words=words, accepted=accepted) for name in names
    )


def without_effect(text: str, *names: str, words: Arity = "one") -> Rows:
    """Rows for flags that are accepted with a note, because the run reaches the same in another way."""
    return tuple(FlagStatus(name=name, kind=Kind.DIFFERENT, text=text, words=words) for name in names)


def differs(text: str, *names: str) -> Rows:
    """Rows for settings of a run that differ from slime's flag of the same name."""
    return tuple(FlagStatus(name=name, kind=Kind.DIFFERENT, text=text, setting=name) for name in names)


def not_here(text: str, *names: str) -> Rows:
    """Rows for flags that end the run before it starts."""
    return tuple(FlagStatus(name=name, kind=Kind.NOT_HERE, text=text) for name in names)
