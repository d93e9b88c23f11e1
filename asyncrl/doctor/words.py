"""Words of a shell command whose parts may be unknown without running the script."""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text of the script after expansion.  Unknown parts stand in it as they are written in the script."""

    value: str
    unset: tuple[str, ...] = ()
    """Variables in it that the script does not set."""
    unknown: tuple[str, ...] = ()
    """Commands in it whose output is unknown."""

    @property
    def is_known(self) -> bool:
        """Whether the value is complete."""
        return not self.unset and not self.unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a word.  Without quotes in the script, white space in it separates words."""

    text: Text
    is_quoted: bool


class Break:
    """The boundary between two elements of an array."""


def literal(value: str) -> Part:
    """Return a part that is written out in the script."""
    return Part(text=Text(value=value), is_quoted=True)


def joined(parts: Iterable[Part | Break]) -> Text:
    """Join all parts to one text, as in an assignment."""
    texts = [Text(value=" ") if isinstance(part, Break) else part.text for part in parts]
    return Text(
        value="".join(text.value for text in texts),
        unset=_distinct(name for text in texts for name in text.unset),
        unknown=_distinct(source for text in texts for source in text.unknown),
    )


def split(parts: Iterable[Part | Break]) -> list[Text]:
    """Split the parts of one written word into the words that bash passes on: none, one or many."""
    words: list[list[Part | Break]] = [[]]
    for part in parts:
        if isinstance(part, Break):
            words.append([])
        elif part.is_quoted or not part.text.is_known:
            words[-1].append(part)
        else:
            for piece in re.findall(r"\s+|\S+", part.text.value):
                if piece.isspace():
                    words.append([])
                else:
                    words[-1].append(literal(piece))
    return [joined(word) for word in words if word]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
