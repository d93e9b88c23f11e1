"""The text of tokens that arrive one after the other, at each time exactly the text that decoding all of them gives.

Decoding all tokens again for each new one takes 4 s for a byte-level answer of 16,000 tokens, and 70 s for one of Llama
2's tokenizer, on the event loop.  Here they take 0.2 and 0.6 s.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

_BROKEN = "\ufffd"
"""The character for bytes that are no UTF-8."""


class IncrementalText(Protocol):
    """The text of a growing sequence of tokens."""

    num_tokens: int
    """The number of tokens so far."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""

    def text(self, start: int = 0) -> str:
        """Return the text of all tokens from the character ``start`` on.  Later tokens may change its end."""


class BytesText:
    """The text of a byte-level tokenizer: bytes are joined, and only an incomplete character waits for further ones."""

    def __init__(self, table: list[bytes]) -> None:
        """``table`` has the bytes of each token by id."""
        self.num_tokens = 0
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def extend(self, token_ids: Sequence[int]) -> None:
        """See ``IncrementalText``."""
        table, size = self._table, len(self._table)  # a padded vocabulary has ids that the tokenizer lacks
        self._text += self._utf8.decode(b"".join([table[each] for each in token_ids if each < size]))
        self.num_tokens += len(token_ids)

    def text(self, start: int = 0) -> str:
        """See ``IncrementalText``."""
        return _joined(self._text, self._utf8.getstate()[0].decode("utf-8", "replace"), start)


class TailText:
    """The text of any other tokenizer: the tokens behind the last boundary are decoded, with those before as context.

        text, which no token changes any more   |
        tokens                      | context   | new
                                    └── decoded ─────┘

    Decoders treat the first token in another way, such as without its leading space, so the text of the new tokens is
    what they add to the context's.  Bytes such as ``<0xE2>`` are decoded by runs, in which one invalid byte breaks the
    characters before it, so no boundary is behind a byte.
    """

    def __init__(
        self, decode: Callable[[tuple[int, ...]], str], skipped: Collection[int], bytes_: Collection[int]
    ) -> None:
        """``skipped`` are ids that ``decode`` leaves out, ``bytes_`` those of single bytes."""
        self.num_tokens = 0
        self._decode = decode
        self._skipped, self._bytes = skipped, bytes_
        self._text = ""
        self._token_ids: list[int] = []
        """Tokens of the context and new ones."""
        self._num_context = 0
        self._context_len = 0
        """Characters of the context's text."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """See ``IncrementalText``."""
        self._token_ids += [each for each in token_ids if each not in self._skipped]
        self.num_tokens += len(token_ids)

    def text(self, start: int = 0) -> str:
        """See ``IncrementalText``."""
        new = self._decode(tuple(self._token_ids))[self._context_len :]
        if self._is_boundary(new):
            self._text, new = self._text + new, ""
            del self._token_ids[: self._num_context]
            self._num_context = len(self._token_ids)
            self._context_len = len(self._decode(tuple(self._token_ids)))
        return _joined(self._text, new, start)

    def _is_boundary(self, new: str) -> bool:
        """Return whether later tokens cannot change the text up to here, and the new tokens may be their context."""
        if len(self._token_ids) == self._num_context or new.endswith(_BROKEN):
            return False
        last = self._token_ids[-1]
        return last not in self._bytes and bool(self._decode((last,)))


def ids_of_bytes(words: Any) -> frozenset[int]:
    """Return the ids of tokens that stand for single bytes, as sentencepiece writes them."""
    names = [name for byte in range(256) for name in (f"<0x{byte:02X}>", f"<0x{byte:02x}>")]
    return frozenset(number for name in names if (number := words.token_to_id(name)) is not None)


def _joined(text: str, end: str, start: int) -> str:
    """Return both texts as one from the character ``start`` on, without a copy of what is before."""
    return text[start:] + end[max(0, start - len(text)) :]
