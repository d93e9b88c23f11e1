"""A reward with parts: most of it for the right answer, the rest for the steps that lead to it."""

import re

from asyncrl.types import Prompt, Sample

RIGHT, SOUND = 0.8, 0.2
"""Weights of the parts in the score."""


def score(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return the score, and the two parts that it is made of."""
    right, sound = is_right(sample.text, str(prompt.label)), share_sound(sample.text, str(prompt.label))
    return {"score": RIGHT * right + SOUND * sound, "right": right, "sound": sound}


def is_right(text: str, label: str) -> float:
    """Return 1.0 if the last number of an answer such as ``348+2=349+1=350`` is the label."""
    return float(text.split("=")[-1] == label)


def share_sound(text: str, label: str) -> float:
    """Return the share of the steps that still have the sum of the problem.  ``349+1`` has the sum 350."""
    steps = text.split("=")
    return sum(total(step) == int(label) for step in steps) / len(steps)


def total(step: str) -> int | None:
    """Return the sum of one step, or None for any other text."""
    found = re.fullmatch(r"(\d{1,6})(?:\+(\d{1,6}))?", step)
    return None if found is None else int(found[1]) + int(found[2] or 0)
