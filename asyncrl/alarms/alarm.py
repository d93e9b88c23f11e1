"""The type of an alarm."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One sign that something is wrong."""

    title: str
    text: str
    """The observation with its numbers, and the place to look at next."""
    since: int
    """The training step that raised it."""
    until: int | None = None
    """The last step with the sign, if it has gone since."""
