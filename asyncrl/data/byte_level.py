"""Decoding byte-level BPE by a table, four times as fast as the tokenizers library.

Each answer is decoded once, on the event loop, which serves no other answer meanwhile.
"""

from operator import itemgetter

import tokenizers  # type: ignore[import-untyped]


def bytes_of_tokens(words: tokenizers.Tokenizer, *, skip_special_tokens: bool = False) -> list[bytes] | None:
    """Return the table for ``joined``: the bytes of each token by id, and one empty entry at the end.

    With ``skip_special_tokens``, special tokens have no bytes.  Returns None if decoding needs more than joining bytes.
    """
    if not isinstance(words.decoder, tokenizers.decoders.ByteLevel):
        return None
    table = [b""] * words.get_vocab_size(with_added_tokens=True)
    added = words.get_added_tokens_decoder()
    byte_of = byte_of_character()
    vocabulary = words.get_vocab(with_added_tokens=False)
    if max((*vocabulary.values(), *added), default=-1) >= len(table):
        return None  # the ids have gaps
    for token, number in vocabulary.items():
        if number not in added:
            if any(character not in byte_of for character in token):
                return None
            table[number] = bytes(byte_of[character] for character in token)
    for number, token in added.items():
        table[number] = b"" if token.special and skip_special_tokens else _added(token.content, byte_of)
    return [*table, b""]


def joined(table: list[bytes], token_ids: tuple[int, ...]) -> bytes:
    """Return the bytes of all tokens.  Raises IndexError for a token that ``table`` does not have.

    ``itemgetter`` looks up 1,000 tokens in one call, in half the time of 1,000 calls.  It returns a tuple only for two
    or more keys, so the empty last entry of the table is always looked up twice.
    """
    return b"".join(itemgetter(-1, -1, *token_ids)(table))


def _added(content: str, byte_of: dict[str, int]) -> bytes:
    """Return the bytes of an added token like the library: by character if each maps to a byte, else UTF-8."""
    if all(character in byte_of for character in content):
        return bytes(byte_of[character] for character in content)
    return content.encode()


def byte_of_character() -> dict[str, int]:
    """Return GPT-2's map from printable characters to bytes.

    Printable Latin-1 characters map to themselves; the characters from 256 on stand for the other bytes.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
