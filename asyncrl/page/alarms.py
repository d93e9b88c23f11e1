"""Alarms in words: signs in the numbers of a run that something is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.page.run_files import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One sign that something is wrong."""

    title: str
    text: str
    """The observation, and the place to look at next."""
    since: int
    """The training step in which the sign was first seen."""


def alarms_of(run: RunFiles) -> Sequence[Alarm]:
    """Return the alarms of a run, the oldest first."""
    return ()
