"""A stop string that an interruption divides ends the answer, although a real SGLang does not see it."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.types import Chunk, FinishReason
from tests.generation import PROMPT, answer, ask, emptied
from tests.sglang_server import Servers, open_sglang

pytestmark = [pytest.mark.timeout(1080), pytest.mark.filterwarnings("ignore::SyntaxWarning")]


def test_a_resumed_answer_ends_at_the_stop_string_that_it_had_begun(servers: Servers) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(servers.model)

    def decode(token_ids: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(token_ids)
        return text

    async def run() -> None:
        async with open_sglang(servers) as place:
            whole = await answer(place.engine, ask(place, 1, 20, top_k=1))
            text = decode(whole.token_ids)
            first = next(at for at in range(2, 18) if text.find(text[at : at + 2]) == at)
            stop, before = text[first : first + 2], whole.token_ids[: first + 1]
            asked = ask(place, 2, 5000, prompt=PROMPT + before, top_k=1, stop=(stop,))
            short = replace(asked, sampling=replace(asked.sampling, max_new_tokens=1))
            assert (await answer(place.engine, short)).finish is FinishReason.LENGTH, "SGLang sees the stop string now"
            chunks: list[Chunk] = []
            retrying = RetryingEngine(place.engine, 0, lambda: place.weights)
            reason = await retrying.generate(replace(asked, request_id="resumed"), chunks.append, decode, before)
            assert reason is FinishReason.STOP
            written = tuple(token for chunk in chunks for token in chunk.token_ids)
            assert decode(before + written) == text[: first + 2]
            await emptied(place)  # the request was aborted: 5,000 tokens take longer

    asyncio.run(run())
