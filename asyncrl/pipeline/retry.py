"""Another attempt when an engine fails, with the tokens that are already there kept."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from asyncrl.errors import EngineLost, EngineTimeout, SampleFailed
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""Before the second attempt; doubled for each one after.  A server that died needs a moment to be noticed."""


class RetryingEngine:
    """A rollout engine whose ``generate`` tries again after EngineLost and EngineTimeout.

    Each new attempt continues behind the tokens already delivered.  Raises SampleFailed after the last one.
    EngineRejected is not tried again: the same request would be refused again.
    """

    def __init__(self, engine: RolloutEngine, max_retries: int, serving: Callable[[], Weights]) -> None:
        """``serving`` says which weights the engines have now."""
        self._engine = engine
        self._max_retries = max_retries
        self._serving = serving
        self.retries = 0

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """As promised by ``RolloutEngine.generate``, with SampleFailed in place of the errors tried again."""
        written: list[int] = []

        def keep(chunk: Chunk) -> None:
            written.extend(chunk.token_ids)
            on_chunk(chunk)

        for attempt in range(self._max_retries + 1):
            try:
                return await self._engine.generate(self._continued(request, written, attempt), keep)
            except (EngineLost, EngineTimeout) as error:
                ended = _ended(written, request.sampling)
                if ended is not None:
                    return ended
                if attempt == self._max_retries:
                    raise SampleFailed(f"{request.request_id}: {attempt + 1} attempts, the last: {error}") from error
                self.retries += 1
                logger.warning(
                    "%s: attempt %d failed, %d tokens kept: %s", request.request_id, attempt + 1, len(written), error
                )
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """Not tried again: only a measurement."""
        return await self._engine.score(token_ids, start)

    def _continued(self, request: Request, written: list[int], attempt: int) -> Request:
        if attempt == 0:
            return request
        left = request.sampling.max_new_tokens - len(written)
        return dataclasses.replace(
            request,
            request_id=f"{request.request_id}-{attempt}",
            token_ids=(*request.token_ids, *written),
            sampling=dataclasses.replace(request.sampling, max_new_tokens=left),
            weights=self._serving(),
        )


def _ended(written: list[int], sampling: SamplingParams) -> FinishReason | None:
    """Why an answer whose last word was lost had already ended, if it had."""
    if written and written[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(written) >= sampling.max_new_tokens else None
