"""The type of a rule."""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.alarms.history import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of alarm."""

    title: str
    needs: tuple[str, ...]
    """Numbers that a step must have; without them, the rule does not look at the step.  A name that ends with a slash
    stands for any number that begins like it."""
    reads: tuple[str, ...] = ()
    """Further numbers that the rule reads."""
    sign: Callable[[History], str | None]
    """Returns what is seen in the newest step, and what to look at; None if nothing is wrong."""
    lasts: int = 1
    """Steps in a row with a sign that raise the alarm; steps without the numbers do not count."""
    look: str
    """The place to look at next, in one or two sentences."""
