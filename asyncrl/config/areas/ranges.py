"""The range checks of single fields.  Each returns one line per field out of range; None is always in range."""

from collections.abc import Iterable

from asyncrl.errors import ConfigError


def at_least(area: object, limit: float, *names: str) -> list[str]:
    """One line for each field below ``limit``."""
    return [
        f"{flag(name)} must be at least {limit}, got {value}"
        for name in names
        if (value := getattr(area, name)) is not None and not value >= limit
    ]


def above(area: object, limit: float, *names: str) -> list[str]:
    """One line for each field that is not above ``limit``."""
    return [
        f"{flag(name)} must be above {limit}, got {value}"
        for name in names
        if (value := getattr(area, name)) is not None and not value > limit
    ]


def must(holds: bool, line: str) -> list[str]:
    """Return ``[line]`` unless the condition ``holds``."""
    return [] if holds else [line]


def refuse(lines: Iterable[str]) -> None:
    """Raise ConfigError with all ``lines``.  No-op if there are none."""
    text = "\n".join(lines)
    if text:
        raise ConfigError(text)


def flag(name: str) -> str:
    """The flag of a field without its leading dashes, which is also its TOML key."""
    return name.replace("_", "-")
