"""The text of an answer while it arrives."""

from array import array
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models  # type: ignore[import-untyped]

from asyncrl.data.tokenizer import TextTokenizer, load_words
from asyncrl.rollouts.gateway.answer_text import AnswerTexts, GrowingText
from asyncrl.rollouts.gateway.sampling import Asked
from asyncrl.types import Chunk, SamplingParams
from tests.unit.data.test_byte_level import byte_level
from tests.unit.rollouts.gateway.templates import QWEN25, tokenizer_with
from tests.unit.rollouts.turns import turn_of

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart" / "model"


class CountingTokenizer(TextTokenizer):
    """A tokenizer that counts the tokens which it decodes."""

    num_decoded = 0

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """See ``TextTokenizer``."""
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


def spaced_words() -> Tokenizer:
    """Words that begin with their space, as sentencepiece writes them."""
    words = Tokenizer(models.WordLevel({"▁It": 0, "▁rains": 1, ".": 2, "▁🎉": 3}, "."))
    words.decoder = decoders.Metaspace()
    return words


def asked(*, stop: tuple[str, ...] = (), skips_special_tokens: bool = True) -> Asked:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=64, stop=stop)
    return Asked(sampling=sampling, skips_special_tokens=skips_special_tokens)


def chunk_of(token_ids: Sequence[int]) -> Chunk:
    return Chunk(token_ids=tuple(token_ids), logprobs=array("f", bytes(4 * len(token_ids))), version=0)


@pytest.mark.parametrize("answer", ["</search>", "It rains.</search>", "a</search>", "It rains."])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_pieces_of_an_answer_have_no_part_of_its_stop_text(tmp_path: Path, answer: str, size: int) -> None:
    tokenizer, settings = tokenizer_with(tmp_path, QWEN25), asked(stop=("</search>", "x"))
    texts = AnswerTexts(tokenizer, ())
    growing, pieces = GrowingText(texts, settings), ""
    token_ids = [token for character in answer for token in tokenizer.encode(character)]
    for chunk in batched(token_ids, size):
        growing.take(chunk_of(chunk))
        pieces += growing.piece()
    turn = turn_of(0, token_ids)
    whole = texts.text(turn, texts.ending(turn, settings), settings)
    assert pieces + growing.rest(whole) == whole == answer.removesuffix("</search>")


@pytest.mark.parametrize("words", [byte_level(), load_words(QUICKSTART), spaced_words()])
@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_the_tokens_of_an_answer_are_decoded_a_few_times_each(words: Tokenizer, stop: tuple[str, ...]) -> None:
    tokenizer = CountingTokenizer(words, None)
    token_ids = [number % words.get_vocab_size() for number in range(2000)]
    growing = GrowingText(AnswerTexts(tokenizer, ()), asked(stop=stop, skips_special_tokens=False))
    pieces = ""
    for token in token_ids:
        growing.take(chunk_of((token,)))
        pieces += growing.piece()
        assert growing.text.startswith(pieces)
    assert tokenizer.num_decoded <= 16 * len(token_ids)
    whole = words.decode(token_ids, skip_special_tokens=False)
    assert pieces + growing.rest(whole) == whole
