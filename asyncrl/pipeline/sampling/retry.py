"""Retries after engine failures, with the generated tokens kept."""

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from asyncrl.errors import EngineError, EngineLost, EngineTimeout, SampleFailed
from asyncrl.pipeline.sampling.stop_texts import Decode, DividedStop, has_stop
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""Seconds before the second attempt, doubled for each further one.  Noticing a dead server takes a moment."""
QUIET_S = 10.0
"""Seconds after a warning in which failed attempts are logged as INFO: a dying engine fails hundreds at once."""
LONGEST_PAUSE_S = 10.0
"""Longest pause before an attempt, in seconds.  A pausing sample holds its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UndeliveredTokens:
    """The functions that are told of tokens of an answer with a grammar, which is delivered at its end."""

    arrived: Callable[[], object] = lambda: None
    """Called when some arrive."""
    dropped: Callable[[int], object] = lambda num_tokens: None
    """Called with the number of tokens that will not be delivered, because the answer begins anew or was given up."""


_UNTOLD = UndeliveredTokens()


class RetryingEngine:
    """A rollout engine whose ``generate`` retries after EngineLost, EngineTimeout and interruptions.

    Each new attempt continues after the tokens already delivered.  An answer with a grammar begins anew instead,
    because SGLang would begin its grammar anew; so its tokens are delivered when it has ended.  Raises SampleFailed
    after the last failed attempt; an interruption does not count as a failure.  EngineRejected is not retried: the
    server would refuse again.
    """

    def __init__(self, engine: RolloutEngine, max_retries: int, serving: Callable[[], Weights]) -> None:
        """Wrap ``engine``.  ``serving`` returns the weights that the engines serve now."""
        self._engine = engine
        self._max_retries = max_retries
        self._serving = serving
        self._open = asyncio.Event()
        self._open.set()
        self._quiet_until = float("-inf")
        self.retries = 0
        """Attempts after a failure, so far."""
        self.aborts = 0
        """Attempts that an interruption ended, so far."""

    async def generate(
        self,
        request: Request,
        on_chunk: Callable[[Chunk], None],
        decode: Decode | None = None,
        before: tuple[int, ...] = (),
        undelivered: UndeliveredTokens = _UNTOLD,
    ) -> FinishReason:
        """See ``RolloutEngine.generate``.  Raises SampleFailed instead of EngineLost and EngineTimeout.

        ``before`` are the last tokens of the request, if earlier calls generated them for the same answer.  ``decode``
        is needed for stop strings that begin in one attempt and end in the next.
        """
        answer = _Answer(request, on_chunk, decode, before, undelivered)
        try:
            return await self._attempts(request, answer)
        finally:
            answer.drop()

    async def _attempts(self, request: Request, answer: "_Answer") -> FinishReason:
        """Make attempts until one ends the answer."""
        failures = 0
        while True:
            await self._open.wait()
            try:
                reason = await self._engine.generate(answer.attempt(self._serving()), answer.keep)
            except _StopReached:  # the engine has aborted the request
                return answer.deliver(FinishReason.STOP)
            except (EngineLost, EngineTimeout) as error:
                failures += 1
                if (reached := answer.end_attempt()) is None:
                    await self._after_failure(request, error, failures, answer.num_written)
            else:
                if reason is not FinishReason.ABORT:
                    return answer.deliver(reason)
                self.aborts += 1
                reached = answer.end_attempt()
            if reached is not None:
                return answer.deliver(reached)

    async def interrupt(self) -> None:
        """End every attempt and begin none before ``continue_generation``; calls of ``generate`` wait until then."""
        self._open.clear()
        await self._engine.interrupt()

    def continue_generation(self) -> None:
        """Let interrupted calls continue."""
        self._open.set()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``.  Not retried, because scores are only a measurement."""
        return await self._engine.score(token_ids, start)

    async def _after_failure(self, request: Request, error: EngineError, failures: int, num_tokens: int) -> None:
        if failures > self._max_retries:
            raise SampleFailed(f"{request.request_id}: {failures} attempts, the last: {error}") from error
        self.retries += 1
        now = asyncio.get_running_loop().time()
        level = logging.WARNING if now >= self._quiet_until else logging.INFO
        if level == logging.WARNING:
            self._quiet_until = now + QUIET_S
        logger.log(level, "%s: attempt %d failed, %d tokens kept: %s", request.request_id, failures, num_tokens, error)
        await asyncio.sleep(_pause_s(failures))


def _pause_s(failures: int) -> float:
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_S)  # 2 ** 1024 is no float


class _StopReached(Exception):
    """Ends an attempt whose tokens complete a stop string that an earlier one began."""


class _Answer:
    """The tokens of one answer, over all attempts."""

    def __init__(
        self,
        request: Request,
        on_chunk: Callable[[Chunk], None],
        decode: Decode | None,
        before: tuple[int, ...],
        undelivered: UndeliveredTokens,
    ) -> None:
        self._request = request
        self._on_chunk = on_chunk
        self._decode = decode
        self._before = before
        self._chunks: list[tuple[int, ...]] = []
        self._written: tuple[int, ...] = ()
        """Tokens of the attempts that have ended."""
        self._undelivered: deque[Chunk] | None = deque() if request.sampling.has_grammar else None
        """Chunks of an answer with a grammar, delivered when it ends; None: each is delivered at once."""
        self._told = undelivered
        self._num_attempts = self._num_routes = 0
        self._divided: DividedStop | None = None

    @property
    def num_written(self) -> int:
        """Tokens of the attempts that have ended."""
        return len(self._written)

    def attempt(self, serving: Weights) -> Request:
        """Begin an attempt under the weights ``serving``; return its request, which continues after all tokens."""
        request = self._request
        if self._decode is not None:
            self._divided = DividedStop(self._before + self._written, request.sampling.stop, self._decode)
        self._num_attempts += 1
        if self._num_attempts == 1:
            waited = request.weights is not serving  # an update ended while this call waited
            return dataclasses.replace(request, weights=serving) if waited else request
        return dataclasses.replace(
            request,
            request_id=f"{request.request_id}-{self._num_attempts - 1}",
            token_ids=request.token_ids + self._written,
            sampling=request.sampling.after(len(self._written)),
            weights=serving,
            routes_from=None if request.routes_from is None else request.routes_from + self._num_routes,
        )

    def keep(self, chunk: Chunk) -> None:
        """Take tokens of the present attempt.  Raises _StopReached with the last one of a divided stop string."""
        last = None if self._divided is None else self._divided.cut(chunk)
        chunk = chunk if last is None else last
        if self._undelivered is None:
            self._on_chunk(chunk)  # first: a chunk that is refused is not kept
        else:
            self._undelivered.append(chunk)
            self._told.arrived()
        self._chunks.append(chunk.token_ids)
        self._num_routes += 0 if chunk.routes is None else len(chunk.routes)
        if last is not None:
            raise _StopReached

    def end_attempt(self) -> FinishReason | None:
        """End an attempt that did not end the answer; return the reason if its tokens have ended it all the same."""
        self._written = tuple(chain.from_iterable(self._chunks))
        reached = ended(self._written, self._request.sampling, self._decode, self._before)
        if reached is None and self._undelivered is not None:
            self.drop()
            self._chunks, self._written, self._num_routes = [], (), 0
        return reached

    def drop(self) -> None:
        """Forget the tokens that are not delivered yet."""
        if self._undelivered:
            self._told.dropped(sum(len(chunk.token_ids) for chunk in self._undelivered))
            self._undelivered.clear()

    def deliver(self, reason: FinishReason) -> FinishReason:
        """Deliver what is not delivered yet, at the end of the answer; return the reason of the end.

        Raises SampleFailed if a chunk is refused: those before it have been delivered, so no attempt may follow.
        """
        try:
            while self._undelivered:
                self._on_chunk(self._undelivered.popleft())
        except (EngineLost, EngineTimeout) as error:
            raise SampleFailed(f"{self._request.request_id}: {error}") from error
        return reason


def ended(
    written: tuple[int, ...], sampling: SamplingParams, decode: Decode | None = None, before: tuple[int, ...] = ()
) -> FinishReason | None:
    """Return the reason why the tokens ``written`` already end the answer, or None if they do not.

    An engine that fails after the last token never reports the end.  ``before`` are tokens of the same answer before
    ``written``, without effect on its length.
    """
    if written and sampling.ends_at(written[-1]):
        return FinishReason.STOP
    if written and sampling.stop and decode is not None and has_stop(before + written, sampling.stop, decode):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(written) >= sampling.max_new_tokens else None
