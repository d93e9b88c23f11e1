"""A request is repeated as often as it may be, however long that takes."""

import asyncio
from collections.abc import Callable

import pytest

from asyncrl.errors import EngineLost, SampleFailed
from asyncrl.pipeline.sampling import retry
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights

WEIGHTS = Weights(version=0, step=0)


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
