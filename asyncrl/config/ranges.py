"""Range checks of single fields.  Each returns one line per field that is out of range; None is always in range."""

from collections.abc import Iterable

from asyncrl.errors import ConfigError


def at_least(area: object, limit: float, *names: str) -> list[str]:
    """Fields that must be ``limit`` or more."""
    return [
        f"{flag(name)} must be at least {limit}, got {value}"
        for name in names
        if (value := getattr(area, name)) is not None and not value >= limit
    ]


def above(area: object, limit: float, *names: str) -> list[str]:
    """Fields that must be more than ``limit``."""
    return [
        f"{flag(name)} must be above {limit}, got {value}"
        for name in names
        if (value := getattr(area, name)) is not None and not value > limit
    ]


def must(holds: bool, line: str) -> list[str]:
    """The line, unless it holds."""
    return [] if holds else [line]


def refuse(lines: Iterable[str]) -> None:
    """Raise ConfigError with all lines, if there are any."""
    text = "\n".join(lines)
    if text:
        raise ConfigError(text)


def flag(name: str) -> str:
    """A field's flag and TOML key, without the leading dashes."""
    return name.replace("_", "-")
