"""The rollout engine: a pool of SGLang servers, reached through the router or, without one, directly."""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from asyncrl.engines.sglang.client.answer import Answer
from asyncrl.engines.sglang.client.calls_in_flight import CallInFlight, CallsInFlight
from asyncrl.engines.sglang.client.control import wait_for_router
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.kept_sets import KeptSets
from asyncrl.engines.sglang.client.least_busy import LeastBusy
from asyncrl.engines.sglang.client.payload import UNREADABLE
from asyncrl.engines.sglang.client.router import introduce, remove
from asyncrl.engines.sglang.client.routes import RouteReader, RoutesShape
from asyncrl.engines.sglang.client.versions import VersionTrail
from asyncrl.engines.sglang.labels import PACKED, Asked, cache_key
from asyncrl.errors import EngineError, EngineLost, EngineRejected, EngineTimeout, ForeignServer, plainly
from asyncrl.event_loop import Deadline, loop_time
from asyncrl.protocols import Score
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams

_ABORT_S = 5.0
"""Deadline in seconds for a server to accept an abort; a live one answers at once."""
_ABORTS_AT_ONCE = 32
"""Aborts in flight to one server.  Its one HTTP process answers them one by one, and each needs a connection."""
ABORT_AGAIN_S = 0.25
"""Seconds between two aborts of the same request.

An abort takes effect after one forward pass, and this time covers several.
"""
DRAIN_S = 5.0
"""Seconds in which a slow server ends its requests: several of its forward passes.  A restart takes far longer."""
INTERRUPT_S = 30.0
"""Seconds for all requests to end after an abort: one forward pass, after at most a few prefills of seconds each."""
ROUTER_S = 300.0
"""Seconds for the router to see a restarted engine, which it probes once a minute.

After each such period a warning is logged, and the wait continues.
"""

ROUTER_AGAIN_S = 5.0
"""Seconds after which the router is told of a restarted engine again, if it did not answer."""

logger = logging.getLogger(__name__)


class SGLangEngine:
    """``RolloutEngine`` over ``engine_urls``.  With ``router_url`` None it sends each request to the least busy engine.

    Bypasses the router while an engine is down and until the router lists it as healthy again, because the router
    notices both too late: it refuses requests that only the restarted engine could take.  An engine that is down for
    long is removed from the router instead.  Also bypasses a router that is down, and one that has just lost a request.
    Without any engine, requests wait.

    ``request_timeout_s`` is the longest silence on a connection, and must be longer than a pause for a weight update.
    """

    def __init__(
        self,
        http: HttpClient,
        engine_urls: tuple[str, ...],
        *,
        router_url: str | None,
        request_timeout_s: float,
        interrupt_timeout_s: float = INTERRUPT_S,
        routes: RoutesShape | None = None,
    ) -> None:
        """``routes`` is given if the servers return routes of experts (``--enable-return-routed-experts``)."""
        if not engine_urls:
            raise ValueError("engine_urls must name at least one engine")
        # Invariant: only the event loop's thread uses this object and its pools; ``leave``, ``join`` and the busy
        # counts never await, so no lock is needed.  From another thread a request could be sent to an engine that is
        # gone, or a busy count could stay too high for good.
        self._http = http
        self._engine_urls = list(engine_urls)
        self._numbers = {url: number for number, url in enumerate(engine_urls)}
        """The number of each engine, as in the names of the servers' logs; a restarted engine keeps it."""
        self._router_url = router_url
        self._direct = LeastBusy(engine_urls)
        self._routed = LeastBusy((router_url,)) if router_url else self._direct
        self._router_is_up = asyncio.Event()
        self._router_is_up.set()
        self._away = set[str]()
        self._gone = set[str]()
        """URLs without an engine that the router may still know."""
        self._idle_s = request_timeout_s
        self._interrupt_s = interrupt_timeout_s
        self._trail = VersionTrail()
        self._kept_sets = KeptSets()
        self._route_reader = None if routes is None else RouteReader(routes)
        self._calls_in_flight = CallsInFlight()
        self._abort_slots = defaultdict[str, asyncio.Semaphore](partial(asyncio.Semaphore, _ABORTS_AT_ONCE))
        """Places for aborts in flight, by the engine's URL."""
        self._prefix, self._counter = uuid.uuid4().hex[:8], itertools.count()

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines that get requests."""
        return tuple(self._engine_urls)

    def leave(self, url: str) -> None:
        """Send no more requests to this engine, which is down."""
        self._away.add(url)
        self._engine_urls.remove(url)
        self._direct.remove(url)

    async def drain(self, url: str) -> None:
        """Interrupt the requests on this engine, which has left; they keep their tokens and continue on others.

        Takes ``DRAIN_S``: the router does not report which requests the engine has, so all are aborted there.
        """
        end = loop_time() + DRAIN_S
        with contextlib.suppress(TimeoutError):
            async with Deadline(DRAIN_S):
                await self._keep_aborting(url, lambda: loop_time() >= end)

    def join(self, url: str) -> None:
        """Send requests again to this engine, which has the current weights.

        All engines get their requests directly until ``route`` has returned.
        """
        self._away.add(url)
        self._gone.discard(url)
        self._engine_urls.append(url)
        self._direct.add(url)

    def move(self, url: str, new_url: str) -> None:
        """Expect this engine, which has left, back at ``new_url``."""
        self._away.discard(url)
        self._away.add(new_url)
        self._gone.add(url)
        self._numbers[new_url] = self._numbers.pop(url)

    async def route(self, url: str) -> None:
        """Return once the router, if there is one, lists this engine as healthy; requests may use the router again."""

        async def introduced(router_url: str) -> None:
            await introduce(self._http, router_url, url, self._gone)
            await wait_for_router(self._http, router_url, (url,), ROUTER_S)

        await self._tell_router(url, introduced)

    async def forget(self, url: str) -> None:
        """Return once the router, if there is one, no longer lists this engine, which has left for long.

        Requests may use the router again.
        """
        self._gone.add(url)
        await self._tell_router(url, lambda router_url: remove(self._http, router_url, self._gone))

    async def _tell_router(self, url: str, tell: Callable[[str], Awaitable[None]]) -> None:
        while self._router_url is not None:
            await self._router_is_up.wait()
            try:
                await tell(self._router_url)
                break
            except (EngineError, ForeignServer) as error:
                logger.warning("%s: requests go to the engines directly", error)
                await asyncio.sleep(ROUTER_AGAIN_S)
        self._away.discard(url)

    def bypass_router(self) -> None:
        """Send requests to the engines directly: the router is down."""
        self._router_is_up.clear()

    def use_router(self, url: str) -> None:
        """Send requests to the router again, which is at ``url`` and lists the engines."""
        self._router_url, self._routed = url, LeastBusy((url,))
        self._router_is_up.set()

    @property
    def _choices(self) -> "LeastBusy":
        is_direct = self._away or not self._router_is_up.is_set() or self._routed.is_avoided
        return self._direct if is_direct else self._routed

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``."""
        asks_for_kept = self._kept_sets.is_asked(request)
        try:
            return await self._generate(request, on_chunk)
        except EngineRejected as error:
            if not asks_for_kept or not self._kept_sets.is_refusal(error):
                raise
        return await self._generate(request, on_chunk)  # a refused request has generated nothing

    async def _generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        # Invariant: ids are never reused, and none is the prefix of another (hence the dot).  SGLang aborts every
        # request whose id *starts* with the given one, and refuses an id that it knows already.
        asked = Asked(returns_kept=self._kept_sets.is_asked(request), routes_from=self._routes_from(request))
        rid = f"{PACKED}{request.request_id}/{self._rid()}{asked.written()}"
        body = _generate_body(request, rid, self._kept_sets) | _routes_fields(asked.routes_from)
        # Invariant: no await between ``some`` and ``LeastBusy.lease``, or the last engine could leave in between.
        await self._choices.some()  # the call is not in flight yet: no interruption waits for it
        call = self._calls_in_flight.begin(rid)
        try:
            answer = Answer(request, call, self._trail, self._kept_sets, self._route_reader, on_chunk)
            async with _ServerLease(self._choices, self._abort, rid, request.routing_key) as url, call:
                return await self._read(f"{url}/generate", body, answer, request.routing_key)
        finally:
            self._calls_in_flight.end(call)

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``.

        Takes at most ``interrupt_timeout_s``, plus the time to abort the requests that are left then.
        """
        with plainly():
            async with TaskGroup() as tasks:
                aborting = [
                    tasks.create_task(self._keep_aborting(url, self._calls_in_flight.are_none), name=f"abort-{url}")
                    for url in self._engine_urls
                ]
                try:
                    async with Deadline(self._interrupt_s):
                        await self._calls_in_flight.until_none()
                except TimeoutError:
                    num_left = self._calls_in_flight.fail_all()
                    logger.warning("%d requests did not end within %g s after abort: lost", num_left, self._interrupt_s)
                    await self._calls_in_flight.until_none()
                for task in aborting:
                    task.cancel()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        await self._choices.some()
        return await self._score_on(self._choices, token_ids, start)

    def scorers(self) -> dict[int, Score]:
        """Return ``score`` of each engine that gets requests, by the engine's number; it bypasses the router."""
        return {self._numbers[url]: partial(self._score_on, LeastBusy((url,))) for url in self._engine_urls}

    async def _score_on(self, choices: LeastBusy, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        if not 1 <= start <= len(token_ids):
            raise ValueError(f"start must be 1 to {len(token_ids)}, got {start}")
        rid = f"score/{self._rid()}."
        body = {
            "rid": rid,
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start - 1,  # the first entry never has a log-prob
            "extra_key": rid,  # unique, so that no cached prefix is reused: older weights may have computed it
        }
        async with _ServerLease(choices, self._abort, rid) as url:
            answer = await self._http.ask(f"{url}/generate", body, self._idle_s)
        try:
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            scored = tuple(token for _, token, _ in entries)
            logprobs = tuple(float(logprob) for logprob, _, _ in entries)  # JSON has null in the place of NaN
        except UNREADABLE as error:
            raise EngineLost(f"{url} sent scores that SGLang never sends: {answer!r:.200}") from error
        # SGLang 0.5.16 reports the last token of the vocabulary as token 0; its log-prob is right.
        if len(scored) != len(token_ids) - start or any(
            token not in (told, 0) for told, token in zip(token_ids[start:], scored, strict=True)
        ):
            raise EngineLost(f"{url} returned log-probs of other tokens than it was given")
        return logprobs

    async def _read(self, url: str, body: dict[str, Any], answer: Answer, routing_key: str | None) -> FinishReason:
        """Stream the events into ``answer`` and return its finish reason.

        Raises EngineLost, EngineTimeout or EngineRejected if the answer has no end.
        """
        try:
            await self._http.stream(url, body, self._idle_s, answer.take, routing_key)
        except (EngineLost, EngineTimeout):
            if answer.reason is None:
                raise
        if answer.reason is None:
            raise EngineLost(f"the answer to {body['rid']} ended without a finish reason")
        return answer.reason

    def _routes_from(self, request: Request) -> int | None:
        return None if self._route_reader is None else request.routes_from

    def _rid(self) -> str:
        """Return an id that is unique on the servers, which other clients and earlier runs may also use."""
        return f"{self._prefix}-{next(self._counter)}"

    async def _abort(self, rid: str) -> None:
        """Abort a request on every engine that is up, because the router does not report which one has it."""
        async with TaskGroup() as posts:
            for url in self._engine_urls:
                posts.create_task(self._abort_on(url, rid), name=f"abort-{rid}")

    async def _abort_on(self, url: str, rid: str) -> None:
        try:
            async with Deadline(_ABORT_S), self._abort_slots[url]:
                await self._http.command(f"{url}/abort_request", {"rid": rid}, _ABORT_S)
        except (EngineError, TimeoutError) as error:
            logger.info("%s was not aborted on %s: %s", rid, url, error or f"no free connection within {_ABORT_S:g} s")

    async def _keep_aborting(self, url: str, is_over: Callable[[], bool]) -> None:
        """Abort every call in flight on one server, repeatedly, until cancelled or ``is_over``.

        A single abort is not enough, because the server may not know a request yet.
        """
        # Invariant: does not rely on its cancellation alone.  A TaskGroup of Python 3.12 drops a cancellation that
        # comes while one of its tasks has failed, here a refused abort: the loop would catch the error and never end.
        while not is_over():
            try:
                with plainly():
                    await self._abort_all(url)
            except EngineError as error:
                logger.warning("%s did not accept aborts, which are repeated: %s", url, error)
            await asyncio.sleep(ABORT_AGAIN_S)

    async def _abort_all(self, url: str) -> None:
        async def post(call: CallInFlight) -> None:
            async with self._abort_slots[url]:
                # Invariant: set before the POST.  The aborted answer may arrive before the POST's own answer, and
                # would count as lost.
                call.is_interrupted = True
                await self._http.command(f"{url}/abort_request", {"rid": call.rid}, _ABORT_S)

        async with TaskGroup() as posts:
            for call in self._calls_in_flight.now():
                posts.create_task(post(call), name=f"abort-{call.rid}")


class _ServerLease:
    """A server, leased for one request by ``async with``.

    The request is aborted unless the block succeeds or the server rejects the request.
    A class, because every sample enters one: a context manager made from a generator takes 10 microseconds.
    """

    __slots__ = ("_abort", "_choices", "_rid", "_routing_key", "_url")

    def __init__(
        self,
        choices: LeastBusy,
        abort: Callable[[str], Coroutine[Any, Any, None]],
        rid: str,
        routing_key: str | None = None,
    ) -> None:
        self._choices = choices
        self._abort = abort
        self._rid = rid
        self._routing_key = routing_key

    async def __aenter__(self) -> str:
        self._url = self._choices.lease(self._routing_key)
        return self._url

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, (EngineLost, EngineTimeout)):
                self._choices.avoid(self._url)
            if error is not None and not isinstance(error, EngineRejected):
                # Shielded: a second cancellation of the caller must not leave the request running on a server.
                await asyncio.shield(self._abort(self._rid))
        finally:  # the count drops only after the abort, so the server is not taken for free while it still generates
            self._choices.release(self._url)


def _generate_body(request: Request, rid: str, kept_sets: KeptSets) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": request.token_ids,
        "sampling_params": {
            **_sampling(request.sampling),
            "top_k": kept_sets.top_k(request),
            "sampling_seed": request.seed,
        },
        "stream": True,
        "return_logprob": True,
        "extra_key": cache_key(request.weights.version),  # no prefix cached under other weights is reused
        **kept_sets.fields(request),
        **({"top_logprobs_num": request.num_top} if request.num_top else {}),
    }


def _routes_fields(routes_from: int | None) -> dict[str, Any]:
    return {} if routes_from is None else {"return_routed_experts": True, "routed_experts_start_len": routes_from}


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    return {
        **sampling.extra,  # first: the settings below, which the rest of asyncrl counts on, take precedence
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        **_optional(sampling),
    }


def _optional(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings that are not off.  SGLang builds a tensor per batch for each setting that is given."""
    given: dict[str, float] = {}
    if sampling.min_new_tokens > 0:
        given["min_new_tokens"] = sampling.min_new_tokens
    if sampling.repetition_penalty != 1.0:
        given["repetition_penalty"] = sampling.repetition_penalty
    return given
