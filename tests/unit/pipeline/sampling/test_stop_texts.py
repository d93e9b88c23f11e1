"""Stop strings of answers that were interrupted inside one."""

from array import array
from collections.abc import Callable

import pytest

from asyncrl.engines.fake import FakeEngine
from asyncrl.errors import EngineLost
from asyncrl.metrics.timeline import NoTimeline
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.rollouts.testing import CharacterTokenizer
from asyncrl.types import Chunk, FinishReason, Prompt, Request, Sample, SamplingParams, Weights
from tests.unit.pipeline.harness import token_sum
from tests.virtual_time import run_virtually

WEIGHTS = Weights(version=0, step=0)
PROMPT, ANSWER, STOP = "Q:", "a <calc>2 + 3</calc>", "</calc>"
BEHIND = " = 6, so"
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=100, stop=(STOP,))
TOKENIZER = CharacterTokenizer()


class Typist(FakeEngine):
    """An engine that writes a text, a character per token, and looks for stop strings as SGLang does.

    It looks at the tokens of the present request alone.  The first attempt ends behind ``first`` tokens.
    """

    def __init__(self, first: int, chunk: int, end: EngineLost | None = None) -> None:
        super().__init__()
        self.first, self.chunk, self.end = first, chunk, end

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        self.requests.append(request)
        whole, own = PROMPT + ANSWER + BEHIND, ""
        most = self.first if len(self.requests) == 1 else len(whole)
        while len(request.token_ids) + len(own) < len(whole) and len(own) < most:
            size = 1 if len(self.requests) == 1 else self.chunk
            place = len(request.token_ids) + len(own)
            new = whole[place : place + size]
            if (at := (own + new).find(STOP)) >= 0:
                new = (own + new)[: at + len(STOP)][len(own) :]
            on_chunk(Chunk(token_ids=tuple(map(ord, new)), logprobs=array("f", [-1.0] * len(new)), version=0))
            own += new
            if at >= 0:
                return FinishReason.STOP
        if len(self.requests) > 1:
            return FinishReason.LENGTH
        if self.end is not None:
            raise self.end
        return FinishReason.ABORT


@pytest.mark.parametrize("end", [None, EngineLost("gone")])
@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("first", [1, len(ANSWER) - 6, len(ANSWER) - 3, len(ANSWER) - 1])
def test_an_answer_ends_with_a_stop_string_that_an_earlier_attempt_began(
    first: int, chunk: int, end: EngineLost | None
) -> None:
    engine, partial = Typist(first, chunk, end), PartialSample(0, {0: WEIGHTS})
    request = Request(request_id="a", token_ids=tuple(map(ord, PROMPT)), sampling=SAMPLING, seed=5, weights=WEIGHTS)
    retrying = RetryingEngine(engine, 2, lambda: WEIGHTS)
    reason, _ = run_virtually(retrying.generate(request, partial.extend, TOKENIZER.decode))
    assert (TOKENIZER.decode(partial.token_ids), reason) == (ANSWER, FinishReason.STOP)
    assert len(engine.requests) == 2


@pytest.mark.parametrize("kept", [len(ANSWER) - 3, len(ANSWER)])
def test_an_answer_of_a_resumed_group_ends_with_the_stop_string_that_it_began(kept: int) -> None:
    engine, serving = Typist(100, 4), ServingWeights(WEIGHTS)
    engine.requests.append(Request(request_id="", token_ids=(1,), sampling=SAMPLING, seed=5, weights=WEIGHTS))
    sampler = Sampler(
        engine=RetryingEngine(engine, 0, lambda: WEIGHTS),
        reward=token_sum,
        reward_timeout_s=1.0,
        tokenizer=TOKENIZER,
        sampling=SAMPLING,
        slots=Slots(1),
        serving=serving,
        timeline=NoTimeline(),
        seed=1,
    )
    partial = sampler.partial(0)
    partial.extend(Chunk(token_ids=tuple(map(ord, ANSWER[:kept])), logprobs=array("f", [-1.0] * kept), version=0))
    prompt = Prompt(row=0, epoch=0, text=PROMPT, token_ids=tuple(map(ord, PROMPT)), label=None)

    async def main() -> Sample:
        return await sampler.generate("g0", 0, prompt, partial.resumed(), lambda _: None)

    sample, _ = run_virtually(main())
    assert (sample.text, sample.finish) == (ANSWER, FinishReason.STOP)
