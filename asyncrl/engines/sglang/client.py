"""The rollout engine: a pool of SGLang servers, spoken to through the router or, without one, directly."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from asyncrl.engines.sglang.http import Wire
from asyncrl.engines.sglang.versions import VersionTrail
from asyncrl.errors import EngineError, EngineLost, EngineRejected, EngineTimeout
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams

_ABORT_S = 5.0
"""For telling the servers that a request was given up; they answer at once or are gone."""
_AVOID_S = 10.0
"""How long a server that lost a request is chosen last."""

logger = logging.getLogger(__name__)


class SGLangEngine:
    """``RolloutEngine`` over ``engine_urls``; ``router_url`` None spreads requests over the least busy engines.

    A pause for a weight update is silence like any other: ``request_timeout_s`` must be longer.
    """

    def __init__(
        self, wire: Wire, engine_urls: tuple[str, ...], *, router_url: str | None, request_timeout_s: float
    ) -> None:
        if not engine_urls:
            raise ValueError("engine_urls must name at least one engine")
        self._wire = wire
        self._engine_urls = engine_urls
        self._choices = _LeastBusy((router_url,) if router_url else engine_urls)
        self._idle_s = request_timeout_s
        self._trail = VersionTrail()

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        # SGLang aborts every request whose id *starts* with the given one, and refuses an id that it knows already.
        rid = f"{request.request_id}/{uuid.uuid4().hex[:8]}."
        body = _generate_body(request, rid)
        async with (
            self._server_for(rid) as url,
            contextlib.aclosing(self._wire.stream(f"{url}/generate", body, self._idle_s)) as events,
        ):
            return await self._read(request, events, on_chunk)

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        if not 1 <= start <= len(token_ids):
            raise ValueError(f"start must be 1 to {len(token_ids)}, got {start}")
        rid = f"score/{uuid.uuid4().hex}."
        body = {
            "rid": rid,
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first entry never has a log-prob
            "extra_key": rid,  # no cached prefix: older weights may have made it
        }
        async with self._server_for(rid) as url:
            answer = await self._wire.ask(f"{url}/generate", body, self._idle_s)
        entries = answer["meta_info"]["input_token_logprobs"][1:]
        scored = tuple(token for _, token, _ in entries)
        # SGLang 0.5.16 reports the last token of the vocabulary as token 0; its log-prob is right.
        if len(scored) != len(token_ids) - start or any(
            token not in (told, 0) for told, token in zip(token_ids[start:], scored, strict=True)
        ):
            raise EngineLost(f"{url} scored other tokens than it was given")
        return tuple(float(logprob) for logprob, _, _ in entries)

    @contextlib.asynccontextmanager
    async def _server_for(self, rid: str) -> AsyncIterator[str]:
        """The server to use; the request is aborted unless the block ends well or the server refuses it."""
        with self._choices.one() as url:
            try:
                yield url
            except EngineRejected:
                raise
            except BaseException:
                await asyncio.shield(self._abort(rid))  # goes on when the caller is cancelled once more
                raise

    async def _read(
        self, request: Request, events: AsyncIterator[dict[str, Any]], on_chunk: Callable[[Chunk], None]
    ) -> FinishReason:
        """Hand the chunks on, until the last one says why."""
        reason: FinishReason | None = None
        version = request.weights.version  # of the chunk to come: no token can be older
        try:
            async for event in events:
                _raise_for_error(event)
                meta = event["meta_info"]
                finished = _reason_of(meta)  # first: the event of an abort repeats a token that was sent before
                tokens, logprobs = _tokens_of(event)
                if tokens:
                    on_chunk(Chunk(token_ids=tokens, logprobs=logprobs, version=version))
                now = asyncio.get_running_loop().time()
                version = max(version, self._trail.settled(int(meta["weight_version"]), now))
                reason = finished or reason
        except (EngineLost, EngineTimeout):
            if reason is None:
                raise
        if reason is None:
            raise EngineLost(f"the answer to {request.request_id} broke off")
        return reason

    async def _abort(self, rid: str) -> None:
        """Tell every engine, as the router does not say which one has it; one that is gone needs no telling."""
        async with asyncio.TaskGroup() as posts:
            for url in self._engine_urls:
                posts.create_task(self._abort_on(url, rid), name=f"abort-{rid}")

    async def _abort_on(self, url: str, rid: str) -> None:
        try:
            await self._wire.command(f"{url}/abort_request", {"rid": rid}, _ABORT_S)
        except EngineError as error:
            logger.warning("could not abort %s: %s", rid, error)


class _LeastBusy:
    """Chooses the server with the fewest requests of ours, those that just failed last."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self._busy = dict.fromkeys(urls, 0)
        self._avoid_until = dict.fromkeys(urls, float("-inf"))

    @contextlib.contextmanager
    def one(self) -> Iterator[str]:
        """The server to use, counted as busy until the end of the block."""
        now = asyncio.get_running_loop().time()
        url = min(self._busy, key=lambda url: (self._avoid_until[url] > now, self._busy[url]))
        self._busy[url] += 1
        try:
            yield url
        except (EngineLost, EngineTimeout):
            self._avoid_until[url] = now + _AVOID_S
            raise
        finally:
            self._busy[url] -= 1


def _generate_body(request: Request, rid: str) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": request.token_ids,
        "sampling_params": {**_sampling(request.sampling), "sampling_seed": request.seed},
        "stream": True,
        "return_logprob": True,
        "extra_key": str(request.weights.version),  # prefixes cached under other weights are not ours
    }


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def _tokens_of(event: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """New tokens and their log-probs; that they belong together is checked, as SGLang slices them separately."""
    tokens = tuple(event["output_ids"])
    entries = event["meta_info"]["output_token_logprobs"]
    if tuple(token for _, token, _ in entries) != tokens:
        raise EngineLost(f"log-probs of tokens {[token for _, token, _ in entries]} came with tokens {list(tokens)}")
    return tokens, tuple(float(logprob) for logprob, _, _ in entries)


def _reason_of(meta: Mapping[str, Any]) -> FinishReason | None:
    finish = meta["finish_reason"]
    if finish is None:
        return None
    if finish["type"] == "abort":  # not asked for: whoever asks for it has stopped listening
        refused = finish.get("status_code") == 400
        raise (EngineRejected if refused else EngineLost)(f"{meta['id']} was aborted: {finish.get('message')}")
    return FinishReason(finish["type"])


def _raise_for_error(event: Mapping[str, Any]) -> None:
    """Errors that come after the status line."""
    error = event.get("error")
    if error is None:
        return
    refused = isinstance(error, dict) and error.get("code") == 400
    raise (EngineRejected if refused else EngineLost)(f"the server says: {error}")
