"""A request is repeated as often as it may be, however long that takes."""

import asyncio
from array import array
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from asyncrl.errors import EngineLost, SampleFailed
from asyncrl.pipeline.sampling import retry
from asyncrl.pipeline.sampling.retry import RetryingEngine, UndeliveredTokens
from asyncrl.token_columns import Routes
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights

WEIGHTS = Weights(version=0, step=0)
ROUTE = Routes(experts_NLK=np.array([[[0, 1]]], np.uint8))


class Away:
    """An engine that loses every request."""

    num_asked = 0

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        self.num_asked += 1
        raise EngineLost("away")

    async def interrupt(self) -> None:
        pass

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        raise EngineLost("away")


def test_engines_may_be_away_for_a_night(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 1,024 retries, each 10 s after the one before, are three hours."""
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.0)
    away, sampling = Away(), SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)
    request = Request(request_id="a", token_ids=(1,), sampling=sampling, seed=1, weights=WEIGHTS)
    engine = RetryingEngine(away, 1100, lambda: WEIGHTS)
    with pytest.raises(SampleFailed, match="1101 attempts, the last: away"):
        asyncio.run(engine.generate(request, lambda chunk: None))
    assert away.num_asked == 1101


class Interrupts:
    """An engine that interrupts its first answer after two tokens, or loses it, and ends the second after three."""

    def __init__(self, end: FinishReason | EngineLost) -> None:
        self.asked: list[Request] = []
        self._end = end

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        self.asked.append(request)
        is_first = len(self.asked) == 1
        for token in (10, 11) if is_first else (20, 21, 22):
            on_chunk(Chunk(token_ids=(token,), logprobs=array("f", [-1.0]), version=0, routes=ROUTE))
        if is_first and isinstance(self._end, EngineLost):
            raise self._end
        return FinishReason.ABORT if is_first else FinishReason.STOP

    async def interrupt(self) -> None:
        pass

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        raise EngineLost("away")


@pytest.mark.parametrize("end", [FinishReason.ABORT, EngineLost("away")])
@pytest.mark.parametrize("grammar", [{}, {"regex": None}, {"regex": "a+b"}, {"json_schema": "{}"}])
def test_an_answer_with_a_grammar_begins_anew(
    grammar: dict[str, str], end: FinishReason | EngineLost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar begins with the request, so tokens from before would be no part of it."""
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.0)
    engine, sampling = (
        Interrupts(end),
        SamplingParams(temperature=1, top_p=1, top_k=-1, max_new_tokens=9, extra=grammar),
    )
    request = Request(request_id="a", token_ids=(1,), sampling=sampling, seed=1, weights=WEIGHTS, routes_from=0)
    chunks: list[Chunk] = []
    reason = asyncio.run(RetryingEngine(engine, 1, lambda: WEIGHTS).generate(request, chunks.append))
    assert reason is FinishReason.STOP
    delivered = [token for chunk in chunks for token in chunk.token_ids]
    if sampling.has_grammar:
        assert delivered == [20, 21, 22]
        assert engine.asked[1].token_ids == (1,)
        assert engine.asked[1].sampling == sampling
        assert engine.asked[1].routes_from == 0
    else:
        assert delivered == [10, 11, 20, 21, 22]
        assert engine.asked[1].token_ids == (1, 10, 11)
        assert engine.asked[1].routes_from == 2
    assert engine.asked[1].request_id == "a-1"


def test_an_answer_with_a_grammar_that_had_ended_is_delivered() -> None:
    """The engine is lost behind the last token."""
    engine = Interrupts(EngineLost("away"))
    sampling = SamplingParams(temperature=1, top_p=1, top_k=-1, max_new_tokens=2, extra={"regex": "a+b"})
    request = Request(request_id="a", token_ids=(1,), sampling=sampling, seed=1, weights=WEIGHTS)
    chunks: list[Chunk] = []
    reason = asyncio.run(RetryingEngine(engine, 1, lambda: WEIGHTS).generate(request, chunks.append))
    assert reason is FinishReason.LENGTH
    assert [chunk.token_ids for chunk in chunks] == [(10,), (11,)]
    assert len(engine.asked) == 1


@pytest.mark.parametrize("num_taken", [0, 1])
def test_an_answer_with_a_grammar_whose_tokens_are_refused_fails_the_sample(num_taken: int) -> None:
    """So are tokens of weights that were never published.  EngineLost would end the run."""

    def refuses(chunk: Chunk) -> None:
        if len(chunks) == num_taken:
            raise EngineLost("an engine names weight version 9, which was never published")
        chunks.append(chunk)

    engine = Interrupts(EngineLost("away"))
    sampling = SamplingParams(temperature=1, top_p=1, top_k=-1, max_new_tokens=2, extra={"regex": "a+b"})
    request = Request(request_id="a", token_ids=(1,), sampling=sampling, seed=1, weights=WEIGHTS)
    chunks: list[Chunk] = []
    with pytest.raises(SampleFailed, match=r"^a: an engine names weight version 9"):
        asyncio.run(RetryingEngine(engine, 1, lambda: WEIGHTS).generate(request, refuses))


@pytest.mark.parametrize(
    ("most_retries", "num_delivered", "dropped"), [(1, 9, [2]), (0, 9, [2]), (1, 1, [2, 1]), (1, 0, [2, 2])]
)
def test_tokens_that_are_not_delivered_are_told(
    most_retries: int, num_delivered: int, dropped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some begin anew after a failure, some are lost with their answer, and some stand behind a refused chunk."""

    def refuses(chunk: Chunk) -> None:
        if len(chunks) == num_delivered:
            raise EngineLost("an engine names weight version 9, which was never published")
        chunks.append(chunk)

    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.0)
    engine = Interrupts(EngineLost("away"))
    sampling = SamplingParams(temperature=1, top_p=1, top_k=-1, max_new_tokens=9, extra={"regex": "a+b"})
    request = Request(request_id="a", token_ids=(1,), sampling=sampling, seed=1, weights=WEIGHTS)
    chunks: list[Chunk] = []
    told: list[int] = []
    arrived: list[None] = []
    undelivered = UndeliveredTokens(arrived=lambda: arrived.append(None), dropped=told.append)
    with suppress(SampleFailed):
        asyncio.run(
            RetryingEngine(engine, most_retries, lambda: WEIGHTS).generate(request, refuses, undelivered=undelivered)
        )
    assert told == dropped
    assert len(arrived) == sum(dropped) + len(chunks) + (num_delivered < 3)


@pytest.mark.parametrize(("extra", "tokens"), [({}, [10, 11]), ({"ignore_eos": True}, [10, 11, 20, 21, 22])])
def test_an_answer_that_ignores_end_tokens_continues_behind_one(extra: dict[str, bool], tokens: list[int]) -> None:
    engine = Interrupts(FinishReason.ABORT)
    sampling = SamplingParams(temperature=1, top_p=1, top_k=-1, max_new_tokens=9, stop_token_ids=(11,), extra=extra)
    request = Request(request_id="a", token_ids=(1,), sampling=sampling, seed=1, weights=WEIGHTS)
    chunks: list[Chunk] = []
    asyncio.run(RetryingEngine(engine, 1, lambda: WEIGHTS).generate(request, chunks.append))
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
