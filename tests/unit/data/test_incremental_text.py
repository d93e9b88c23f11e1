"""Texts that grow by tokens are at each time what the tokenizers library decodes from all tokens."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from asyncrl.data.incremental_text import BytesText, TailText
from asyncrl.data.tiktoken_words import load_tiktoken
from asyncrl.data.tokenizer import TextTokenizer, load_words
from tests.unit.data.test_byte_level import byte_level
from tests.unit.data.tiktoken_for_tests import tiktoken_folder

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart"
FILES = sorted(QUICKSTART.rglob("tokenizer.json"))
TEXT = "The cat's sat,  don't WORRY: äöü 日本語 北京市\n\n\tnaïve 👩‍👩‍👧 emoji 🎉🎊 . ! 1234567 x=1 \ufffd ünï"
SPECIAL = ["<s>", "</s>", "<|end|>"]


def metaspace(decoder: Any, *, has_bytes: bool = False) -> Any:
    """A BPE of words that begin with ``▁``, which writes characters that it lacks as bytes like Llama 2."""
    words = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=has_bytes))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if has_bytes else []
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *bytes_], show_progress=False)
    words.train_from_iterator([TEXT[:40] if has_bytes else TEXT] * 5, trainer)
    if has_bytes:  # ``special_tokens`` of a trainer are added tokens, which Llama's bytes are not
        model = words.model
        words = tokenizers.Tokenizer(model)
        words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    words.decoder = decoder
    words.add_special_tokens(SPECIAL)
    words.add_tokens(["<think>"])
    return words


def word_piece() -> Any:
    names = ["[UNK]", "the", "cat", "##s", "##ing", ".", "!", "n't", "do", "'", "s", "ü", "##🎉"]
    words = tokenizers.Tokenizer(models.WordPiece({name: place for place, name in enumerate(names)}))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    words.add_special_tokens(SPECIAL)
    return words


def word_level(decoder: Any) -> Any:
    names = ["<unk>", "a", "b</w>", "c</w>", "🎉"]
    words = tokenizers.Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        words.decoder = decoder
    words.add_special_tokens(SPECIAL)
    return words


def wrapped_byte_level() -> Any:
    words = byte_level()
    words.decoder = decoders.Sequence([decoders.ByteLevel()])
    return words


def llama() -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return metaspace(decoders.Sequence(steps), has_bytes=True)


def gemma() -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return metaspace(decoders.Sequence(steps), has_bytes=True)


MADE: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte level, wrapped": wrapped_byte_level,
    "metaspace": lambda: metaspace(decoders.Metaspace(prepend_scheme="always")),
    "metaspace, none before": lambda: metaspace(decoders.Metaspace(prepend_scheme="never")),
    "llama": llama,
    "gemma": gemma,
    "word pieces": word_piece,
    "words": lambda: word_level(None),
    "words with ends": lambda: word_level(decoders.BPEDecoder(suffix="</w>")),
    **{f"quickstart {file.parent.name}": functools.partial(load_words, file.parent) for file in FILES},
}


@functools.cache
def words_of(kind: str) -> Any:
    return MADE[kind]()


kinds = pytest.mark.parametrize("kind", MADE)


def check(words: Any, token_ids: list[int], sizes: list[int], *, skips: bool) -> None:
    """Compare the text behind each chunk with the library's, as a whole and from some character on."""
    growing = TextTokenizer(words, None, skip_special_tokens=skips).incremental()
    place, number = 0, 0
    while place < len(token_ids):
        size = sizes[number % len(sizes)]
        growing.extend(token_ids[place : place + size])
        place, number = place + size, number + 1
        whole = words.decode(token_ids[:place], skip_special_tokens=skips)
        assert growing.text(max(0, len(whole) - size)) == whole[max(0, len(whole) - size) :]
        assert growing.text() == whole
    assert growing.num_tokens == len(token_ids)


sizes_of_chunks = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@kinds
@pytest.mark.parametrize("skips", [False, True])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data(), sizes=sizes_of_chunks)
def test_any_tokens_in_any_chunks_have_the_library_s_text(
    kind: str, skips: bool, data: st.DataObject, sizes: list[int]
) -> None:
    words = words_of(kind)
    draw = random.Random(data.draw(st.integers(0, 1 << 30)))
    size = words.get_vocab_size() + 3  # a padded vocabulary has ids that the tokenizer lacks
    written = words.encode(TEXT, add_special_tokens=False).ids
    special = [words.token_to_id(each) for each in SPECIAL if words.token_to_id(each) is not None] or [0]
    token_ids: list[int] = []
    for _ in range(draw.randrange(1, 8)):
        start = draw.randrange(len(written))
        token_ids += draw.choice(
            [
                [draw.randrange(size) for _ in range(draw.randrange(12))],
                written[start : start + draw.randrange(20)],
                draw.choices(special, k=draw.randrange(4)),
            ]
        )
    check(words, token_ids, sizes, skips=skips)


@kinds
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_real_text_has_the_library_s_text_at_each_token(kind: str, size: int) -> None:
    words = words_of(kind)
    check(words, words.encode(TEXT * 2, add_special_tokens=False).ids, [size], skips=True)


@pytest.mark.parametrize("skips", [False, True])
def test_a_tokenizer_of_ranks_has_the_text_of_all_tokens(tmp_path: Path, skips: bool) -> None:
    words = load_tiktoken(tiktoken_folder(tmp_path))
    draw = random.Random(1)
    written = words.encode(TEXT).ids
    for _ in range(20):
        drawn = [draw.randrange(words.get_vocab_size() + 3) for _ in range(30)]
        check(words, [*drawn, *written], [1, 3, 2], skips=skips)


@pytest.mark.parametrize("text", ["🎉🎊👩‍👩‍👧", "éüß日本"])
def test_a_character_that_is_split_over_tokens_waits_for_its_bytes(text: str) -> None:
    words = words_of("llama")
    token_ids = [words.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    assert None not in token_ids
    for behind in ("The", "<0xFF>", "<0xE2>"):
        check(words, [*token_ids, words.token_to_id(behind) or 0, *token_ids], [1], skips=True)


@pytest.mark.parametrize(
    ("kind", "expected"), [("byte level", BytesText), ("byte level, wrapped", TailText), ("llama", TailText)]
)
def test_tails_are_decoded_only_where_bytes_cannot_be_joined(kind: str, expected: type) -> None:
    assert isinstance(TextTokenizer(words_of(kind), None).incremental(), expected)


@pytest.mark.parametrize("kind", ["llama", "metaspace", "word pieces"])
def test_each_token_is_decoded_a_few_times(kind: str) -> None:
    words, decoded = words_of(kind), 0

    def decode(token_ids: tuple[int, ...]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        text: str = words.decode(list(token_ids), skip_special_tokens=True)
        return text

    special = words.token_to_id("</s>")
    growing = TailText(decode, frozenset({special}), frozenset())
    token_ids = [*words.encode("the cat sat. " * 500).ids, *[special] * 500]
    for token in token_ids:
        growing.extend((token,))
        growing.text()
    assert growing.text() == words.decode(token_ids, skip_special_tokens=True)
    assert decoded <= 8 * len(token_ids)
