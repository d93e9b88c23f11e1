"""Tokenizers of tiktoken files give the tokens of tiktoken, and decode like the library of other tokenizers."""

import base64
import json
import time
import warnings
from itertools import batched
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data import load_tokenizer, tiktoken_words
from asyncrl.data.tiktoken_words import MAX_RUN, PATTERN, TiktokenWords, load_tiktoken, pieces_of
from asyncrl.errors import DataError
from tests.unit.data.tiktoken_for_tests import PLAIN, SPECIAL, ranks, tiktoken_folder
from tests.unit.data.tokenizers_for_tests import tokenizer_folder

RANKS = ranks()
FIRST = len(RANKS)
"""The id of the first added token."""
NAMED = {FIRST + place: text for place, (text, _) in SPECIAL.items()} | {FIRST + PLAIN[0]: PLAIN[1]}
REFERENCE = tiktoken.Encoding(
    name="reference",
    pat_str=PATTERN,
    mergeable_ranks=RANKS,
    special_tokens={NAMED.get(number, f"<|reserved_token_{number}|>"): number for number in range(FIRST, FIRST + 258)},
)
TEXTS = [
    "",
    "The cat's sat.  Don't!\n\n\tx = 12345 SHE'LL",
    "北京市 Pascal 日本語で 中文English混合 naïve ünïcode",
    "<|im_user|>hello [BOS]<|im_end|><|tool_call_begin|><|nothing|>",
    "   \n  trailing   ",
    "emoji 🎉🎊 \u200d e\u0301 \x00",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiktoken_folder(tmp_path_factory.mktemp("kimi"))


def test_the_pattern_is_that_of_the_models_code() -> None:
    """The whole expression, as the models' files have it."""
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    before, ending = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    others = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    assert rf"[\p{{Han}}]+|{words}|{others}" == PATTERN


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_tiktoken(folder: Path, text: str) -> None:
    words = load_tokenizer(folder)
    token_ids = REFERENCE.encode(text, allowed_special="all")
    assert words.encode(text) == token_ids
    assert words.encode_all([text, "one", text]) == [token_ids, REFERENCE.encode("one"), token_ids]


def test_han_runs_words_and_numbers_are_separate(folder: Path) -> None:
    pieces = {"北京市 Pascal": ["北京市", " Pascal"], "汉字abc": ["汉字", "abc"], "12345x": ["123", "45", "x"]}
    words = load_tokenizer(folder)
    for text, parts in pieces.items():
        assert words.encode(text) == [number for part in parts for number in words.encode(part)]


def test_tokens_equal_those_of_transformers_converter(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.convert_slow_tokenizer import TikTokenConverter
    names = [NAMED.get(number, f"<|reserved_token_{number}|>") for number in range(FIRST, FIRST + 258)]
    converter = TikTokenConverter(str(folder / "tiktoken.model"), pattern=PATTERN, extra_special_tokens=names)
    theirs, words = converter.converted(), load_tokenizer(folder)
    for text in TEXTS:
        token_ids = theirs.encode(text, add_special_tokens=False).ids
        assert words.encode(text) == token_ids
        decoded = theirs.decode(token_ids, skip_special_tokens=False)
        assert load_tiktoken(folder).decode(token_ids, skip_special_tokens=False) == decoded


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.text(max_size=80), st.binary(min_size=2, max_size=200))
def test_any_text_comes_back_and_any_tokens_decode(text: str, draws: bytes) -> None:
    words = TiktokenWords(RANKS, {})
    encodable = text.encode("utf-8", "replace").decode()
    assert words.decode(words.encode(encodable).ids) == encodable
    drawn = [int.from_bytes(pair) % FIRST for pair in batched(draws, 2)]
    assert words.decode(drawn) == REFERENCE.decode(drawn)


def test_answers_decode_by_the_table_and_without_it_alike(folder: Path) -> None:
    fast, slow = load_tokenizer(folder), load_tiktoken(folder)
    text = "hello <|tool_call_begin|> 北京<|im_end|>"
    token_ids = tuple(fast.encode(text))
    assert FIRST + 2 in token_ids
    assert slow.decode(token_ids, skip_special_tokens=False) == text
    assert slow.decode(token_ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    assert fast.decode(token_ids) in (text, text.removesuffix("<|im_end|>"))
    beyond = (*token_ids, FIRST + 300)  # a padded vocabulary
    assert fast.decode(beyond) == fast.decode(token_ids)
    assert fast._bytes is not None and len(fast._bytes) == FIRST + 258 + 1  # noqa: SLF001


def test_the_vocabulary_has_every_token_once() -> None:
    words = TiktokenWords(RANKS, {})
    assert len(words.get_vocab()) == words.get_vocab_size() == FIRST
    assert words.get_vocab()["Ġcat"] == RANKS[b" cat"]


def test_long_runs_are_cut_where_the_models_code_cuts_them(folder: Path) -> None:
    run = "a" * (2 * MAX_RUN + 7)
    assert [len(piece) for piece in pieces_of(f"b {run} c")] == [2 + MAX_RUN, MAX_RUN, 7 + 2]
    assert [len(piece) for piece in pieces_of(" " * (MAX_RUN + 1) + "x")] == [MAX_RUN, 2]
    assert [len(piece) for piece in pieces_of("ab " * 200_000)] == [400_000, 200_000]
    assert list(pieces_of("a" * MAX_RUN)) == ["a" * MAX_RUN]
    words = load_tokenizer(folder)
    expected = [number for piece in pieces_of(run) for number in REFERENCE.encode(piece)]
    assert words.encode(run) == expected == words.encode_all(["x", run])[1]


def cut_by_character(text: str, most: int) -> list[str]:
    """Cut within runs of more than ``most`` characters, one character at a time."""
    parts, size = [""], 0
    for before, character in zip(" " + text, text, strict=False):
        size = size + 1 if before.isspace() == character.isspace() else 1
        if size > most:
            parts.append("")
            size = 1
        parts[-1] += character
    return parts


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.text(st.sampled_from("ab北 \n\u2003\x1c\u200b"), max_size=60))
def test_cuts_are_those_of_a_walk_over_the_characters(text: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiktoken_words, "MAX_RUN", 3)
        assert list(pieces_of(text)) == (cut_by_character(text, 3) if text else [])


def test_the_time_to_cut_runs_is_linear() -> None:
    text = ("北" * (MAX_RUN - 1) + " ") * 4
    begin = time.process_time()
    assert list(pieces_of(text)) == [text]
    assert time.process_time() - begin < 1.0  # trying each character as the beginning of a run takes seconds


def test_chats_are_rendered_and_tokenised_with_the_models_tokens(folder: Path) -> None:
    words = load_tokenizer(folder)
    text = words.render([{"role": "user", "content": "one"}])
    assert text == "<|im_user|>one<|im_end|><|im_assistant|>"
    assert words.encode(text)[0] == FIRST + 3


def test_a_tokenizer_json_goes_before_the_ranks(tmp_path: Path) -> None:
    tokenizer_folder(tiktoken_folder(tmp_path))
    assert load_tokenizer(tmp_path).encode("one two") == [1, 2]


def rewritten(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder


def line(word: bytes, rank: int) -> str:
    return f"{base64.b64encode(word).decode()} {rank}"


BYTES = [line(bytes([byte]), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tiktoken.model", "no ranks here", "tiktoken.model: not a file of tiktoken ranks"),
        ("tiktoken.model", "", "its 0 ranks must be 0, 1, 2"),
        ("tiktoken.model", "\n".join(BYTES[:-1]), "has no token for byte 255"),
        ("tiktoken.model", "\n".join([*BYTES, line(b"ab", 300)]), "its 257 ranks must be 0, 1, 2"),
        ("tiktoken.model", "\n".join([*BYTES, line(b"a", 256)]), "its 257 ranks must be 0, 1, 2"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: cannot read its added_tokens_decoder"),
        ("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"1": {}}}), "cannot read its added_tokens"),
        ("tokenization_other.py", "pat_str = 'x'", "splits texts by another pattern than Kimi K2 and Moonlight"),
    ],
)
def test_a_damaged_or_unknown_tokenizer_is_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    rewritten(tiktoken_folder(tmp_path), name, content)
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    tiktoken_folder(tmp_path, code=False)
    before = load_tokenizer(tmp_path).encode("cat")
    rewritten(tmp_path, "tiktoken.model", "\n".join(BYTES))
    after: Any = load_tokenizer(tmp_path).encode("cat")
    assert before != after == [*b"cat"]
