"""The reward for a multiple-choice answer: the letter of an option, or the option's text."""

import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders.labels import answers

_BEFORE, _BEHIND = r"[\s:*_\"'(\[{$\\]{0,8}", r"[\s*_\"')\]}$]{0,8}"
"""Spaces, a colon, quotes, brackets and markup before and behind a letter."""
_ANNOUNCED = (
    re.compile(
        rf"(?:answer|option|choice)(?:\s+(?:option|choice))?{_BEFORE}(?:is\b)?{_BEFORE}(?:boxed\{{)?([A-Z])\b",
        re.IGNORECASE,
    ),
    re.compile(rf"\b([A-Z])\b{_BEHIND}is\s*(?:the)?\s*correct", re.IGNORECASE),
)
"""A letter with a word that announces it.  The first match of the first pattern that matches a valid letter counts.

slime's patterns take letters of words as well: in "The answer is (B)", the I of "is" would be the option I.
"""
_ALONE = re.compile(r"\b([A-Z])\b")
_THOUGHT_ENDS = "</think>"
_DEFAULT_LETTERS = tuple(string.ascii_uppercase[:10])


def option(response: str, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 if the answer names the right option, else 0.0.

    The label is a letter, the index of an option, its text, or a list or an object of them.  ``metadata`` may hold
    ``choices`` (a list or an object), ``valid_letters``, ``correct_letter``, ``correct_answer`` and ``answer_text``.
    Text up to ``</think>`` does not count.  Raises RewardFailed for a label without an answer, unless the metadata
    has ``correct_letter``.
    """
    text = response.rpartition(_THOUGHT_ENDS)[2]
    return float(any(_names(text, _question(answer, metadata)) for answer in _answers(label, metadata)))


def named_letter(response: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the letter of the option that the answer names, or None; ``metadata`` as for ``option``."""
    return _letter(response.rpartition(_THOUGHT_ENDS)[2], _letters(metadata.get("valid_letters"), _choices(metadata)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    letters: tuple[str, ...]
    right: str | None
    """The letter of the right option; None if it is unknown."""
    texts: tuple[str, ...]
    """Texts that are right as well, for an answer without a letter."""


def _answers(label: Any, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the acceptable answers of the label; one None if only the metadata has them."""
    if label is None:
        return (None,)
    try:
        return answers(label)
    except RewardFailed:
        if not metadata.get("correct_letter"):
            raise
        return (None,)


def _names(text: str, question: _Question) -> bool:
    given = _letter(text, question.letters)
    if given and question.right:
        return given == question.right
    words = f" {_plain(text)} "
    return any(target and f" {target} " in words for target in map(_plain, question.texts))


def _question(label: Any, metadata: Mapping[str, Any]) -> _Question:
    choices = _choices(metadata)
    letters = _letters(metadata.get("valid_letters"), choices)
    text = label.strip() if isinstance(label, str) else ""
    right = _right(label, text, metadata.get("correct_letter"), choices, letters)
    texts = [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    if right in letters and letters.index(right) < len(choices):
        texts.append(choices[letters.index(right)])
    if text.upper() not in letters:  # as a text, the letter A would be right in any response with that word
        texts.append(text)
    return _Question(letters=letters, right=right, texts=tuple(texts))


def _choices(metadata: Mapping[str, Any]) -> list[str]:
    found = metadata.get("choices")
    return [str(choice) for choice in (found.values() if isinstance(found, Mapping) else found or ())]


def _letters(given: Iterable[Any] | None, choices: list[str]) -> tuple[str, ...]:
    if given:
        return tuple(str(letter).upper() for letter in given)
    return tuple(string.ascii_uppercase[: len(choices)]) if choices else _DEFAULT_LETTERS


def _right(label: Any, text: str, given: Any, choices: list[str], letters: tuple[str, ...]) -> str | None:
    if isinstance(label, int | float) and 0 <= int(label) < len(letters):
        return letters[int(label)]
    if isinstance(given, str) and given.strip():
        return given.strip().upper()
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    place = _place(text, choices)
    return None if place is None or place >= len(letters) else letters[place]


def _place(text: str, choices: list[str]) -> int | None:
    """Return the place of the choice with this text: the same, or else the only one with the same words."""
    if text and text in (stripped := [choice.strip() for choice in choices]):
        return stripped.index(text)
    plain, words = [_plain(choice) for choice in choices], _plain(text)
    return plain.index(words) if words and plain.count(words) == 1 else None


def _letter(text: str, letters: tuple[str, ...]) -> str | None:
    """Return the option that the text names, or None."""
    for pattern in _ANNOUNCED:
        found = pattern.search(text)
        if found and found[1].upper() in letters:
            return found[1].upper()
    alone = [letter for letter in _ALONE.findall(text) if letter in letters]
    return alone[-1] if alone else None


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
