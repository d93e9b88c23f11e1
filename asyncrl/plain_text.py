"""Text of users and models for a terminal or a log: it controls nothing, and forges no line."""

import re

_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except the tab, line separators, characters that turn the direction of the text, and halves of
surrogate pairs, which no encoding can write."""
_NEXT_LINE = "\n    "


def encodable(text: str) -> str:
    r"""Return ``text`` with halves of surrogate pairs, which UTF-8 cannot encode, as escapes: ``\ud83d``.

    JSON that a model cuts within an emoji has them, as have names of files that are no UTF-8.  Exceptions quote both.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    r"""Return ``text`` with each control character and line break as an escape: ESC becomes ``\x1b``."""
    return _CONTROLS.sub(_escaped, text)


def indented(text: str) -> str:
    """Return ``text`` without control characters, its second and further lines indented by four spaces.

    No line but the first can be taken for the beginning of a log record.
    """
    return _NEXT_LINE.join(map(one_line, text.split("\n")))


def _escaped(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]
