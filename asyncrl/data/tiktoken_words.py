"""The tokenizer of Kimi K2 and Moonlight: a file of tiktoken ranks, without ``tokenizer.json``.

The models' folders have code for it (``tokenization_kimi.py``, ``tokenization_moonshot.py``), which is not executed.
``TiktokenWords`` has the part of ``tokenizers.Tokenizer`` that ``TextTokenizer`` uses, on top of the same tiktoken
encoding: ranks from ``tiktoken.model``, special tokens from ``tokenizer_config.json``, and ``PATTERN``.
"""

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers  # type: ignore[import-untyped]

from asyncrl.data.byte_level import byte_of_character
from asyncrl.errors import DataError

RANKS_FILE = "tiktoken.model"
_CASED, _ENDING = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER, _BEFORE = r"[\p{Lu}\p{Lt}" + _CASED, r"[\p{Ll}" + _CASED, r"[^\r\n\p{L}\p{N}]?"
ALTERNATIVES = (
    r"[\p{Han}]+",
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}",
    f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
PATTERN = "|".join(ALTERNATIVES)
"""The pattern that splits a text before byte pairs are merged.

``pat_str`` in ``tokenization_kimi.py`` of moonshotai/Kimi-K2-Instruct and in ``tokenization_moonshot.py`` of
moonshotai/Moonlight-16B-A3B, which are equal in this.
"""
NUM_RESERVED = 256 + 2
"""The number of ids after the last rank that are special tokens, as in the same files."""
MAX_CHARACTERS, MAX_RUN = 400_000, 25_000
"""Limits of the same files: a text is encoded in pieces of ``MAX_CHARACTERS``, and cut within longer runs of spaces or
of other characters than ``MAX_RUN``.  A cut can change tokens, so it must be at the same place."""
_RUN = re.compile(r"\s+|\S+")


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text, like ``tokenizers.Encoding``."""

    ids: list[int]


class TiktokenWords:
    """A tiktoken encoding with the methods of ``tokenizers.Tokenizer`` that ``TextTokenizer`` calls."""

    def __init__(self, ranks: Mapping[bytes, int], added: Mapping[int, tokenizers.AddedToken]) -> None:
        """Take the rank of each sequence of bytes, and the added tokens by id."""
        self.decoder = tokenizers.decoders.ByteLevel()
        self._ranks, self._added = ranks, added
        self._bytes = {rank: word for word, rank in ranks.items()}
        self._encoding = tiktoken.Encoding(
            name=RANKS_FILE,
            pat_str=PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens={token.content: number for number, token in added.items()},
        )

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoded:
        """Tokenise ``text``; special tokens in it get their ids.  None are added."""
        pieces = pieces_of(text)
        return Encoded([number for piece in pieces for number in self._encoding.encode(piece, allowed_special="all")])

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[Encoded]:
        """Tokenise each text, on all cores."""
        pieces = [list(pieces_of(text)) for text in texts]
        flat = [piece for each in pieces for piece in each]
        found = iter(self._encoding.encode_batch(flat, num_threads=os.cpu_count() or 1, allowed_special="all"))
        return [Encoded([number for _ in each for number in next(found)]) for each in pieces]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``.  Ids that the tokenizer lacks have no text."""
        return b"".join(self._text(number, skip_special_tokens) for number in token_ids).decode("utf-8", "replace")

    def get_vocab(self, *, with_added_tokens: bool = True) -> dict[str, int]:
        """Return the id of each token, with printable characters in place of bytes."""
        character_of = {byte: character for character, byte in byte_of_character().items()}
        found = {"".join(map(character_of.__getitem__, word)): rank for word, rank in self._ranks.items()}
        return found | ({token.content: number for number, token in self._added.items()} if with_added_tokens else {})

    def get_vocab_size(self, *, with_added_tokens: bool = True) -> int:
        """Return the number of tokens."""
        return len(self._ranks) + (len(self._added) if with_added_tokens else 0)

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """Return the added tokens by id."""
        return dict(self._added)

    def _text(self, number: int, skips_special: bool) -> bytes:
        token = self._added.get(number)
        if token is None:
            return self._bytes.get(number, b"")
        return b"" if token.special and skips_special else str(token.content).encode()


def load_tiktoken(folder: Path) -> TiktokenWords:
    """Load ``tiktoken.model`` of a local checkpoint folder.  Raises DataError if it is damaged or of another model."""
    _check_pattern(folder)
    ranks = _ranks(folder / RANKS_FILE)
    return TiktokenWords(ranks, _added_tokens(folder / "tokenizer_config.json", len(ranks)))


def pieces_of(text: str) -> Iterator[str]:
    """Cut ``text`` where the models' code cuts it."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part, begin = text[start : start + MAX_CHARACTERS], 0
        for run in _RUN.finditer(part) if len(part) > MAX_RUN else ():
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[begin:cut]
                begin = cut
        yield part[begin:]


def _check_pattern(folder: Path) -> None:
    """Raise DataError if the code of the folder's tokenizer has another pattern.  The code is read, not executed."""
    for file in folder.glob("tokenization_*.py"):
        source = file.read_text(encoding="utf-8", errors="replace")
        if not all(alternative in source for alternative in ALTERNATIVES):
            raise DataError(
                f"{file} splits texts by another pattern than Kimi K2 and Moonlight, the only tiktoken models that "
                "asyncrl reads; save_pretrained() of the model's fast AutoTokenizer writes a tokenizer.json"
            )


def _ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each sequence of bytes.

    ``tiktoken.load`` would return an older copy of the file: it caches by path, below the folder of temporary files.
    """
    try:
        rows = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(word, validate=True): int(rank) for word, rank in rows}
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a file of tiktoken ranks: {error}") from error
    if sorted(ranks.values()) != list(range(len(rows))) or not rows:
        raise DataError(f"{file}: not a file of tiktoken ranks: its {len(rows)} ranks must be 0, 1, 2, ...")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"{file}: not a file of tiktoken ranks: it has no token for byte {missing[0]}")
    return ranks


def _added_tokens(file: Path, first: int) -> dict[int, tokenizers.AddedToken]:
    """Return the special tokens, whose ids start at ``first``.  Ids without a name are reserved tokens."""
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        given = {int(number): _added_token(token) for number, token in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: cannot read its added_tokens_decoder: {error}") from error
    reserved = {
        number: tokenizers.AddedToken(f"<|reserved_token_{number}|>", special=False, normalized=False)
        for number in range(first, first + NUM_RESERVED)
    }
    return reserved | {number: token for number, token in given.items() if number in reserved}


def _added_token(token: Mapping[str, Any]) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token["content"], special=bool(token.get("special", True)), normalized=False)
