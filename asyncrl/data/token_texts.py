"""The text of each token, for people who look at single tokens.

A character can have several tokens.  The last of them gets the character, and each earlier one its bytes in hexadecimal
digits, so that nothing becomes a replacement character.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers  # type: ignore[import-untyped]

from asyncrl.data.byte_level import bytes_of_tokens
from asyncrl.data.tokenizer import load_words

PART_OF_A_CHARACTER = "…"
"""The text of a token whose bytes are unknown and are part of a character."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of one token."""

    text: str
    is_special: bool = False
    """Whether it is a special token, such as the end of an answer."""
    is_part: bool = False
    """Whether it ends within a character, so that ``text`` has bytes in hexadecimal digits."""


class TokenTexts:
    """The tokens of one tokenizer."""

    def __init__(self, words: Any) -> None:
        """``words`` is a ``tokenizers.Tokenizer``, or has its methods."""
        self._words = words
        self._bytes = bytes_of_tokens(words)
        self._special = {number for number, token in words.get_added_tokens_decoder().items() if token.special}

    def of(self, token_ids: Sequence[int]) -> list[TokenText]:
        """Return the text of each token of a sequence."""
        return self._of_streamed(token_ids) if self._bytes is None else self._of_bytes(self._bytes, token_ids)

    def _of_bytes(self, table: Sequence[bytes], token_ids: Sequence[int]) -> list[TokenText]:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        texts = []
        for number in token_ids:
            if not 0 <= number < len(table) - 1:
                texts.append(TokenText(f"⟨{number}⟩"))
                continue
            text = decoder.decode(table[number])
            pending = decoder.getstate()[0]
            begun = table[number][-len(pending) :].hex(" ") if pending else ""
            texts.append(TokenText(text + (f"⟨{begun}⟩" if begun else ""), number in self._special, bool(begun)))
        return texts

    def _of_streamed(self, token_ids: Sequence[int]) -> list[TokenText]:
        """Return the texts under a tokenizer whose decoder is more than a table, such as those of SentencePiece."""
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
        texts = []
        for number in token_ids:
            text = stream.step(self._words, number)
            is_special = number in self._special
            texts.append(TokenText(PART_OF_A_CHARACTER if text is None else text, is_special, text is None))
        return texts


def load_token_texts(folder: Path) -> TokenTexts:
    """Load the tokenizer of a local checkpoint folder.  Raises DataError if its files are missing or unreadable."""
    return TokenTexts(load_words(folder))
