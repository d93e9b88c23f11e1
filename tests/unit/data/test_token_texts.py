from pathlib import Path

import pytest
from tokenizers import (  # type: ignore[import-untyped]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)

from asyncrl.data.token_texts import PART_OF_A_CHARACTER, TokenText, TokenTexts, load_token_texts
from asyncrl.errors import DataError


def byte_level() -> Tokenizer:
    """A tokenizer whose tokens are single bytes, and one special token."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocabulary, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<end>"])
    return words


def test_a_character_of_several_tokens_is_shown_once_and_whole() -> None:
    words = byte_level()
    texts = TokenTexts(words).of(words.encode("hé 😀<end>").ids)
    assert [each.text for each in texts] == ["h", "⟨c3⟩", "é", " ", "⟨f0⟩", "⟨9f⟩", "⟨98⟩", "😀", "<end>"]
    assert [each.is_part for each in texts] == [False, True, False, False, True, True, True, False, False]
    assert texts[-1] == TokenText("<end>", is_special=True)


def test_bytes_of_no_character_and_unknown_ids_are_shown_as_such() -> None:
    words = byte_level()
    first, second = words.encode("é").ids
    number = words.get_vocab_size() + 5
    texts = [each.text for each in TokenTexts(words).of([second, first, first, second, number, -1])]
    assert texts == ["\\xa9", "⟨c3⟩", "\\xc3⟨c3⟩", "é", f"⟨{number}⟩", "⟨-1⟩"]
    assert "�" not in "".join(texts)


def test_other_decoders_wait_for_the_whole_character() -> None:
    vocabulary = {"<unk>": 0, "▁a": 1} | {f"<0x{byte:02X}>": byte + 2 for byte in range(256)}
    words = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(words).of([1, *(byte + 2 for byte in "😀".encode()), 1])
    assert [each.text for each in texts] == [" a", *[PART_OF_A_CHARACTER] * 3, "😀", " a"]
    assert [each.is_part for each in texts] == [False, True, True, True, False, False]


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json: no such file"):
        load_token_texts(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert load_token_texts(tmp_path).of([0])[0].text == "!"
