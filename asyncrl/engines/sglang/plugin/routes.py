"""Routes of experts with every chunk: a part of the plug-in for token versions.

SGLang 0.5.16 sends the routes of a request once, with its last event, and loses them if the request is aborted after a
retraction.  After a retraction it also computes them anew, possibly with other weights.  These hooks send the rows of
each event's tokens with the event, of mixture layers only, in one or two bytes an expert:

    an event is filled (``accept``) ────▶ it gets the rows that were not sent yet
    a request is retracted ─────────────▶ its rows are kept before SGLang frees their places
    a request ends (``_maybe_collect``) ─▶ the rest of its rows, narrowed
    events that waited are joined ──────▶ so are their rows, of which SGLang keeps the last part only

``req.routed_experts_start_len`` is SGLang's first row to send; moved on with each event, it makes SGLang itself collect
only the rest.

Invariant: the first three run on the scheduler's thread, the last on the event loop of the HTTP server.  A row is read
only for positions before the last token: SGLang writes a pass's rows before it appends the pass's token.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.engines.sglang.labels import ROUTES
from asyncrl.engines.sglang.plugin import route_store
from asyncrl.engines.sglang.plugin.activation import note
from asyncrl.internals import Internal, unlike

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
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
    Internal(name=_RELEASE, attributes=("req", "req_to_token_pool"), used_in=__name__),
    Internal(name=_COLLECT, parameters=("self", "req"), is_exact=True, used_in=__name__),
    Internal(name=_CAPTURER, used_in=__name__),
    Internal(
        name="sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.get_topk",
        keywords=("req_pool_idx", "seqlen", "req_to_token_pool", "start_len"),
        parameters=("self",),
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator",
        attributes=("rids", "routed_experts"),
        used_in=__name__,
    ),
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
    Internal(name=_SCHEDULER, attributes=("model_config", "req_to_token_pool", "tp_worker"), used_in=__name__),
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
    HookRegistry.register(_RELEASE, rows.before_release, HookType.BEFORE)
    HookRegistry.register(_COLLECT, rows.after_collection, HookType.AFTER)
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


class RouteRows:
    """The hooks of one scheduler process."""

    def __init__(self) -> None:
        self.is_working = True
        """Whether rows are sent with events.  Once False, it stays False."""
        self._scheduler: Any = None
        self._layers: list[int] | None = None
        """The mixture layers; None until they are first needed."""
        self._dtype: Any = None

    def before_run_batch(self, scheduler: Any, *batch: Any, **named: Any) -> None:
        """Note the scheduler, which has the map from a request's positions to rows."""
        self._scheduler = scheduler

    def around_accept(self, accept: Callable[..., None], events: Any, *, req: Any) -> None:
        """Give the event of a request, if it gets one now, the rows that were not sent yet."""
        before = len(events.rids)
        accept(events, req=req)
        if len(events.rids) > before and req.return_routed_experts:
            self._fill(events, req)

    @_careful
    def _fill(self, events: Any, req: Any) -> None:
        if req.routed_experts is None:  # it has not ended, or it was aborted while it waited
            if req.req_pool_idx is not None:
                self._hold(req, self._scheduler.req_to_token_pool)
            events.routed_experts[-1] = vars(req).pop(_HELD, None)

    @_careful
    def before_release(self, *args: Any, req: Any, req_to_token_pool: Any, **named: Any) -> None:
        """Keep the rows of a request that is retracted; they are sent with its tokens."""
        if req.return_routed_experts and req.req_pool_idx is not None:
            self._hold(req, req_to_token_pool)

    @_careful
    def after_collection(self, result: None, processor: Any, req: Any) -> None:
        """Narrow the rows that SGLang collected, and put the held ones in front."""
        if req.routed_experts is not None:
            import torch

            held = vars(req).pop(_HELD, None)
            rest = self._narrowed(req.routed_experts)
            req.routed_experts = rest if held is None else torch.cat([held, rest])

    def _hold(self, req: Any, pool: Any) -> None:
        """Hold the rows of all positions but the last, and move the first row to send on."""
        import torch
        from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

        capturer = get_global_experts_capturer()
        stop = len(req.origin_input_ids) + len(req.output_ids_through_stop) - 1
        if capturer is None or stop <= req.routed_experts_start_len or not len(req.output_ids_through_stop):
            return
        rows = capturer.get_topk(
            req_pool_idx=req.req_pool_idx,
            seqlen=stop + 1,
            req_to_token_pool=pool,
            start_len=req.routed_experts_start_len,
        )
        held, rows = vars(req).get(_HELD), self._narrowed(rows)
        setattr(req, _HELD, rows if held is None else torch.cat([held, rows]))
        req.routed_experts_start_len = stop

    def _narrowed(self, rows: Any) -> Any:
        """Return the rows of mixture layers in one or two bytes an expert."""
        if self._layers is None:
            self._layers, self._dtype = _mixture_layers(self._scheduler), _dtype_of(self._scheduler)
        return rows[:, self._layers].to(self._dtype)


def after_join(result: Any, manager: Any, events: Any, *rest: Any, **named: Any) -> None:
    """Give events that are joined into one the rows of all of them, as a list."""
    parts = [part for part in (_part_of(event) for event in events) if part is not None]
    if parts:
        result["meta_info"][ROUTES] = parts


def _part_of(event: Any) -> Any:
    meta = event.get("meta_info") if isinstance(event, Mapping) else None
    return meta.get(ROUTES) if isinstance(meta, Mapping) else None


def _mixture_layers(scheduler: Any) -> list[int]:
    """Return the numbers of the layers whose experts are captured."""
    from sglang.srt.layers.moe.topk import TopK

    model = scheduler.tp_worker.model_runner.model
    return sorted({each.layer_id for each in model.modules() if isinstance(each, TopK) and each.layer_id is not None})


def _dtype_of(scheduler: Any) -> Any:
    import torch

    return torch.uint8 if route_store.is_narrow(scheduler.model_config.hf_text_config) else torch.uint16


def _warn(why: str) -> None:
    logger.warning(
        "asyncrl: this SGLang is unlike 0.5.16 (%s): routes of experts come with the last event of a request only, and "
        "those of a retracted request are lost",
        why,
    )
