"""Routes of experts with every chunk: a part of the plug-in for token versions.

SGLang 0.5.16 sends the routes of a request once, with its last event, and loses them if the request is aborted after a
retraction.  After a retraction it also computes them anew, possibly with other weights.  These hooks send the rows of
each event's tokens with the event, of mixture layers only, in one or two bytes an expert:

    a request ends (``_maybe_collect``), or its event is filled (``accept``) ─▶ the rows to send are noted
    a pass's events go out (``to_payload``) ──▶ the noted rows of all of them are read at once
    a request is retracted ───────────────────▶ its rows are kept before SGLang frees their places
    events that waited are joined ────────────▶ so are their rows, of which SGLang keeps the last part only

``req.routed_experts_start_len`` is SGLang's first row to send; it moves on with each event.  A read costs the
scheduler's thread about 0.1 ms of calls, and it waits for the device: one a pass.

Invariant: all but the last run on the scheduler's thread, the last on the event loop of the HTTP server.  A row is read
only for positions before the last token: SGLang writes a pass's rows before it appends the pass's token.  Between the
note and the read, SGLang starts no pass, so that the places of a request that ended still have its rows.  Rows that
were noted before another pass are not read.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

from asyncrl.engines.sglang.labels import ROUTES
from asyncrl.engines.sglang.plugin import route_store
from asyncrl.engines.sglang.plugin.activation import note
from asyncrl.engines.sglang.plugin.route_store import Span
from asyncrl.internals import Internal, unlike

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_EVENTS = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
_ACCEPT = f"{_EVENTS}.accept"
_PAYLOAD = f"{_EVENTS}.to_payload"
_RELEASE = "sglang.srt.managers.schedule_batch.release_req"
_COLLECT = (
    "sglang.srt.managers.scheduler_components.batch_result_processor."
    "SchedulerBatchResultProcessor._maybe_collect_routed_experts"
)
_JOIN = "sglang.srt.managers.tokenizer_manager.TokenizerManager._coalesce_streaming_chunks"
_CAPTURER = "sglang.srt.state_capturer.routed_experts.get_global_experts_capturer"
_HELD = "asyncrl_routes"
"""Attribute of a request with the rows of positions before ``routed_experts_start_len`` that no event has yet."""
_UNLIKE = (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Exceptions of our hooks in an SGLang with different internals."""

INTERNALS = (
    Internal(name=_ACCEPT, parameters=("self",), keywords=("req",), used_in=__name__),
    Internal(name=_PAYLOAD, parameters=("self",), keywords=("dp_rank", "is_idle_batch"), used_in=__name__),
    Internal(name=_RELEASE, attributes=("req", "req_to_token_pool"), used_in=__name__),
    Internal(name=_COLLECT, parameters=("self", "req"), is_exact=True, used_in=__name__),
    Internal(name=_CAPTURER, used_in=__name__),
    Internal(name=_EVENTS, attributes=("rids", "routed_experts"), used_in=__name__),
    Internal(
        name="sglang.srt.managers.schedule_batch.Req",
        attributes=(
            "origin_input_ids",
            "output_ids_through_stop",
            "req_pool_idx",
            "return_routed_experts",
            "routed_experts",
            "routed_experts_start_len",
        ),
        used_in=__name__,
    ),
    Internal(name=f"{_SCHEDULER}.run_batch", parameters=("self", "batch"), used_in=__name__),
    Internal(name=_SCHEDULER, attributes=("req_to_token_pool", "server_args", "tp_worker"), used_in=__name__),
    Internal(name="sglang.srt.environ.envs.SGLANG_USE_PICKLE_IPC", used_in=__name__),
    Internal(name="sglang.srt.layers.moe.topk.TopK", attributes=("layer_id", "topk_config"), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""
JOIN_INTERNALS = (Internal(name=_JOIN, parameters=("self", "out_list", "rid"), used_in=__name__),)
"""Names in the process that serves HTTP."""

logger = logging.getLogger(__name__)


def activate(*, serves_http: bool) -> None:
    """Register all hooks, or none with one warning if SGLang's internals differ."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    expected = (*INTERNALS, *route_store.INTERNALS, *(JOIN_INTERNALS if serves_http else ()))
    if (difference := unlike(expected)) is not None:
        note("routes", difference)
        _warn(difference)
        return
    note("routes")
    route_store.register()
    rows = RouteRows()
    HookRegistry.register(f"{_SCHEDULER}.run_batch", rows.before_run_batch, HookType.BEFORE)
    HookRegistry.register(_ACCEPT, rows.around_accept, HookType.AROUND)
    HookRegistry.register(_PAYLOAD, rows.before_payload, HookType.BEFORE)
    HookRegistry.register(_RELEASE, rows.before_release, HookType.BEFORE)
    HookRegistry.register(_COLLECT, rows.around_collection, HookType.AROUND)
    if serves_http:
        HookRegistry.register(_JOIN, after_join, HookType.AFTER)


def _careful[**P](hook: Callable[P, None]) -> Callable[P, None]:
    """Wrap a hook so that one failure, caused by other internals of SGLang, disables all hooks with one warning."""

    @functools.wraps(hook)
    def careful(*args: P.args, **kwargs: P.kwargs) -> None:
        rows = args[0]
        assert isinstance(rows, RouteRows)
        if rows.is_working:
            try:
                hook(*args, **kwargs)
            except _UNLIKE as error:
                rows.is_working = False
                note("routes", f"{type(error).__name__}: {error}")
                _warn(f"{type(error).__name__}: {error}")

    return careful


class SentRows(NamedTuple):
    """Rows on their way to the process that writes them in base64.

    That process asks an event's rows for ``numpy().tobytes()``.  A tensor takes 0.1 ms more to pickle and to read.
    """

    data: bytes

    def numpy(self) -> Self:
        """Return these rows."""
        return self

    def tobytes(self) -> bytes:
        """Return the bytes of the rows."""
        return self.data


class _Noted(NamedTuple):
    """The rows of an event, until all events of a pass are there."""

    held: bytes
    """Rows that were read before, which go first."""
    span: Span | None
    """The rows to read."""
    num_passes: int
    """Passes that had started.  The rows of ``span`` are at their places until another one starts."""


class RouteRows:
    """The hooks of one scheduler process."""

    def __init__(self) -> None:
        self.is_working = True
        """Whether rows are sent with events.  Once False, it stays False."""
        self._scheduler: Any = None
        self._layers: Any = None
        """The mixture layers, as an index of a row; None until they are first needed."""
        self._is_pickled = False
        """Whether rows travel as pickled objects to the process that writes them in base64."""
        self._num_passes = 0

    def before_run_batch(self, scheduler: Any, *batch: Any, **named: Any) -> None:
        """Note the scheduler, which has the map from a request's positions to rows, and that a pass starts."""
        self._scheduler = scheduler
        self._num_passes += 1

    def around_accept(self, accept: Callable[..., None], events: Any, *, req: Any) -> None:
        """Note the rows of a request that were not sent yet, if the request gets an event now."""
        before = len(events.rids)
        accept(events, req=req)
        if len(events.rids) > before and req.return_routed_experts:
            self._note(events, req)

    @_careful
    def _note(self, events: Any, req: Any) -> None:
        if req.routed_experts is None:  # it has not ended, or it was aborted while it waited
            events.routed_experts[-1] = self._noted(req)

    def around_collection(self, collect: Callable[..., None], processor: Any, req: Any) -> None:
        """Note the rest of the rows of a request that ends, instead of reading them."""
        if req.return_routed_experts:
            self._note_rest(req)
        if not self.is_working:
            collect(processor, req)

    @_careful
    def _note_rest(self, req: Any) -> None:
        req.routed_experts = self._noted(req)

    def before_payload(self, events: Any, *args: Any, **named: Any) -> None:
        """Give the events of a pass their rows."""
        if events.routed_experts is not None:
            self._fill(events)
            events.routed_experts[:] = [None if isinstance(each, _Noted) else each for each in events.routed_experts]

    @_careful
    def _fill(self, events: Any) -> None:
        noted = [
            (place, each)
            for place, each in enumerate(events.routed_experts)
            if isinstance(each, _Noted) and each.num_passes == self._num_passes
        ]
        parts = iter(self._read([each.span for _, each in noted if each.span], self._scheduler.req_to_token_pool))
        for place, each in noted:
            rows = each.held + (next(parts) if each.span else b"")
            events.routed_experts[place] = self._sendable(rows) if rows else None

    @_careful
    def before_release(self, *args: Any, req: Any, req_to_token_pool: Any, **named: Any) -> None:
        """Keep the rows of a request that is retracted; they are sent with its tokens."""
        if req.return_routed_experts and (span := self._span_of(req)):
            setattr(req, _HELD, vars(req).get(_HELD, b"") + self._read([span], req_to_token_pool)[0])

    def _noted(self, req: Any) -> _Noted:
        return _Noted(vars(req).pop(_HELD, b""), self._span_of(req), self._num_passes)

    def _span_of(self, req: Any) -> Span | None:
        """Return the rows to send of all positions but the last, and move the first row to send on."""
        stop = len(req.origin_input_ids) + len(req.output_ids_through_stop) - 1
        start = req.routed_experts_start_len
        if req.req_pool_idx is None or stop <= start or not len(req.output_ids_through_stop):
            return None
        req.routed_experts_start_len = stop
        return Span(req.req_pool_idx, start, stop)

    def _read(self, spans: list[Span], pool: Any) -> list[bytes]:
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        capturer = get_global_experts_capturer()
        if capturer is None or not spans:
            return [b""] * len(spans)
        return route_store.read(capturer, pool, spans, self._mixtures())

    def _mixtures(self) -> Any:
        if self._layers is None:
            self._layers, self._is_pickled = _mixture_layers(self._scheduler), _is_pickled(self._scheduler)
        return self._layers

    def _sendable(self, rows: bytes) -> Any:
        """Return rows as the next process can read them."""
        import torch

        if self._is_pickled:
            return SentRows(rows)
        return torch.frombuffer(bytearray(rows), dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8)


def after_join(result: Any, manager: Any, events: Any, *rest: Any, **named: Any) -> None:
    """Give events that are joined into one the rows of all of them, as a list."""
    parts = [part for part in (_part_of(event) for event in events) if part is not None]
    if parts:
        result["meta_info"][ROUTES] = parts


def _part_of(event: Any) -> Any:
    meta = event.get("meta_info") if isinstance(event, Mapping) else None
    return meta.get(ROUTES) if isinstance(meta, Mapping) else None


def _mixture_layers(scheduler: Any) -> slice | list[int]:
    """Return the numbers of the layers whose experts are captured; a slice, which copies nothing, if it can be one."""
    from sglang.srt.layers.moe.topk import TopK

    model = scheduler.tp_worker.model_runner.model
    found = sorted({each.layer_id for each in model.modules() if isinstance(each, TopK) and each.layer_id is not None})
    if found and found == list(range(found[0], found[-1] + 1)):
        return slice(found[0], found[-1] + 1)
    return found


def _is_pickled(scheduler: Any) -> bool:
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_USE_PICKLE_IPC.get()) and not scheduler.server_args.skip_tokenizer_init


def _warn(why: str) -> None:
    logger.warning(
        "asyncrl: this SGLang is unlike 0.5.16 (%s): routes of experts come with the last event of a request only, and "
        "those of a retracted request are lost",
        why,
    )
