"""The text of an answer while it arrives."""

from array import array
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

import pytest

from asyncrl.rollouts.gateway.answer_text import AnswerTexts, GrowingText
from asyncrl.rollouts.gateway.sampling import Asked
from asyncrl.types import Chunk, SamplingParams
from tests.unit.rollouts.gateway.templates import QWEN25, tokenizer_with
from tests.unit.rollouts.turns import turn_of


def asked(*, stop: tuple[str, ...] = ()) -> Asked:
    return Asked(sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=64, stop=stop))


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
