"""The table of a byte-level tokenizer decodes as the tokenizers library does."""

import random
from itertools import batched
from pathlib import Path
from typing import Any

import tokenizers  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.byte_level import bytes_of_tokens
from asyncrl.data.tokenizer import TextTokenizer, load_tokenizer

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart"


def byte_level() -> Any:
    """A byte-level BPE like those of Qwen and Llama 3: merges that split characters; special and plain added tokens."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words.train_from_iterator(["the cat  sat, äöü 日本語 日本 don 't . ! \n\n\t emoji 🎉🎊 naïve"] * 5, trainer)
    words.add_special_tokens(["<|end|>", "<|pad|>"])
    words.add_tokens(["<think>", "</think>", "two words", "ünï"])
    return words


WORDS = byte_level()
OURS = TextTokenizer(WORDS, None)
OURS_SKIPPING = TextTokenizer(WORDS, None, skip_special_tokens=True)
SIZE = WORDS.get_vocab_size(with_added_tokens=True)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.binary(min_size=1, max_size=1200))
def test_any_tokens_decode_as_the_library_decodes_them(draws: bytes) -> None:
    drawn = [int.from_bytes(pair) % (SIZE + 3) for pair in batched(draws, 2)]  # a draw for each would be slow
    for token_ids in batched(drawn, 1 + draws[0] % 60):
        assert OURS.decode(token_ids) == WORDS.decode(token_ids, skip_special_tokens=False)
        assert OURS_SKIPPING.decode(token_ids) == WORDS.decode(token_ids, skip_special_tokens=True)


def test_special_tokens_stay_in_the_text_unless_skipped() -> None:
    answer = (*OURS.encode("the cat"), WORDS.token_to_id("<|end|>"))
    assert OURS.decode(answer) == "the cat<|end|>"
    assert OURS_SKIPPING.decode(answer) == "the cat"


def test_the_table_is_used_for_byte_level_tokenizers_only() -> None:
    assert bytes_of_tokens(WORDS) is not None
    assert bytes_of_tokens(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))) is None


def test_the_quickstarts_decode_as_the_library_decodes_them() -> None:
    for file in sorted(QUICKSTART.rglob("tokenizer.json")):
        words, skips = tokenizers.Tokenizer.from_file(str(file)), load_tokenizer(file.parent, skip_special_tokens=True)
        keeps = load_tokenizer(file.parent)
        rng = random.Random(1)
        for _ in range(50):
            drawn = [rng.randrange(words.get_vocab_size()) for _ in range(30)]
            assert skips.decode(tuple(drawn)) == words.decode(drawn, skip_special_tokens=True)
            assert keeps.decode(tuple(drawn)) == words.decode(drawn, skip_special_tokens=False)
