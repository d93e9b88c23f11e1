"""A sample that grows chunk by chunk."""

from array import array
from collections.abc import Callable

import pytest

from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import EngineLost
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights
from tests.virtual_time import run_virtually

FIRST = Weights(version=0, step=0)


def chunk(*tokens: int, version: int = 0) -> Chunk:
    return Chunk(token_ids=tokens, logprobs=array("f", [-1.0] * len(tokens)), version=version)


def test_a_chunk_of_an_unknown_version_leaves_the_sample_unchanged() -> None:
    partial = PartialSample(0, {0: FIRST})
    partial.extend(chunk(1, 2))
    with pytest.raises(EngineLost, match="weight version 9, which was never published"):
        partial.extend(chunk(3, version=9))
    assert partial.token_ids == (1, 2)
    assert partial.num_tokens == 2
    assert partial.finish("", FinishReason.STOP, 1.0).token_ids == (1, 2)


class Forgetful(FakeEngine):
    """An engine whose second chunk names a version that nothing has published, once."""

    num_wrong = 1

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        num_chunks = 0

        def spoilt(each: Chunk) -> None:
            nonlocal num_chunks
            num_chunks += 1
            if num_chunks == 2 and self.num_wrong:
                self.num_wrong -= 1
                each = Chunk(token_ids=each.token_ids, logprobs=each.logprobs, version=9)
            on_chunk(each)

        return await super().generate(request, spoilt)


def test_a_request_is_sent_again_after_the_chunks_of_known_versions() -> None:
    engine, partial = Forgetful(lambda request: 15 - len(request.token_ids), chunk=4), PartialSample(0, {0: FIRST})
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=100)
    request = Request(request_id="a", token_ids=(1, 2, 3), sampling=sampling, seed=5, weights=FIRST)

    async def main() -> FinishReason:
        return await RetryingEngine(engine, 2, lambda: FIRST).generate(request, partial.extend)

    reason, _ = run_virtually(main())
    assert reason is FinishReason.STOP
    assert [len(each.token_ids) for each in engine.requests] == [3, 7]
    expected = PartialSample(0, {0: FIRST})
    run_virtually(FakeEngine(lambda _: 12).generate(request, expected.extend))
    assert partial.token_ids == expected.token_ids
