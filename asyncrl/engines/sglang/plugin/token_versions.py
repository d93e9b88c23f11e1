"""Weight versions per token and prefix caches per version: a plug-in of stock SGLang, group ``sglang.srt.plugins``.

It hooks the scheduler process, through SGLang's registry:

    run_batch ───────────▶ every token is stamped with the version that its forward pass ran under
    a weight update ─────▶ the version changes; waiting requests get its cache key; the answer has the time since the
                           last forward pass
    (re-)queueing ───────▶ a request gets the current cache key; a retracted one first sends the tokens it holds back
    pause ───────────────▶ begins once no forward pass is running

and the process that serves HTTP:

    an event is filled ──▶ it gets the routes of experts, if its request asks for them (``routes``)
    an event is written ─▶ packed, if its request asks for it (``packed``)
    a request is read ───▶ gets the fields that its id names (``asked_fields``); is refused, if the scheduler would end
                           with it (``request_check``)

Without the plug-in the client still works: it then assumes the oldest possible version of each chunk
(``client/versions``).  SGLang imports this module in its main process, and in schedulers that are not forked from it;
all the hooked modules are imported there already.

Invariant: in each process all hooks run on one thread (the scheduler's; the HTTP server's event loop), so their state
needs no lock.  They never block, except ``before_pause``.
"""

import functools
import logging
import multiprocessing
import time
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.engines.listening import INTERNALS as LISTENING
from asyncrl.engines.listening import bind_stores
from asyncrl.engines.sglang.labels import STAMPS, STOOD_STILL, cache_key, is_cache_key
from asyncrl.engines.sglang.packed import pack
from asyncrl.engines.sglang.plugin import asked_fields, request_check, routes
from asyncrl.engines.sglang.plugin.activation import note, note_and_answer
from asyncrl.errors import InternalsChanged
from asyncrl.internals import Internal, unlike

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WRITE_EVENT = "sglang.srt.entrypoints.http_server.dumps_json"
_UPDATES = ("distributed", "disk", "tensor", "ipc")
"""Every way in which SGLang 0.5.16 receives new weights."""
_UNLIKE = (AttributeError, ImportError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""Exceptions of our hooks in an SGLang with different internals."""

logger = logging.getLogger(__name__)


INTERNALS = (
    Internal(name=f"{_SCHEDULER}._add_request_to_queue", parameters=("self", "req", "is_retracted"), used_in=__name__),
    Internal(name=f"{_SCHEDULER}.run_batch", parameters=("self", "batch"), used_in=__name__),
    Internal(name=f"{_SCHEDULER}.pause_generation", parameters=("self", "recv_req"), is_exact=True, used_in=__name__),
    Internal(
        name=f"{_SCHEDULER}.continue_generation", parameters=("self", "recv_req"), is_exact=True, used_in=__name__
    ),
    Internal(
        name=_SCHEDULER,
        attributes=("enable_overlap", "output_streamer", "result_queue", "server_args", "waiting_queue"),
        used_in=__name__,
    ),
    *(
        Internal(
            name=f"{_UPDATER}.update_weights_from_{source}",
            parameters=("self", "recv_req"),
            is_exact=True,
            used_in=__name__,
        )
        for source in _UPDATES
    ),
    Internal(name=_UPDATER, attributes=("scheduler",), used_in=__name__),
    Internal(
        name="sglang.srt.managers.schedule_batch.Req",
        attributes=(
            "extra_key",
            "is_retracted",
            "output_ids",
            "return_logprob",
            "sampling_params",
            "send_token_offset",
            "stream",
        ),
        used_in=__name__,
    ),
    Internal(
        name="sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        attributes=("customized_info",),
        used_in=__name__,
    ),
    Internal(name=_WRITE_EVENT, parameters=("content",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""


def activate() -> None:
    """Register all hooks, or none with one warning if SGLang's internals differ.  SGLang calls this."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if unlike(LISTENING) is None:
        bind_stores()
    stamps = TokenStamps()
    updates = {f"{_UPDATER}.update_weights_from_{source}": stamps.after_update for source in _UPDATES}
    before: dict[str, Callable[..., Any]] = {
        f"{_SCHEDULER}._add_request_to_queue": stamps.before_queueing,
        f"{_SCHEDULER}.pause_generation": stamps.before_pause,
        f"{_SCHEDULER}.continue_generation": stamps.before_continuing,
    }
    if multiprocessing.parent_process() is None:  # schedulers are child processes and write no HTTP
        before[_WRITE_EVENT] = PackedEvents().before_writing
        asked_fields.activate()
        request_check.activate()
    after: dict[str, Callable[..., None]] = {
        f"{_SCHEDULER}.run_batch": stamps.after_run_batch,
        **updates,
    }
    expected = [each for each in INTERNALS if each.name != _WRITE_EVENT or _WRITE_EVENT in before]
    if (difference := unlike(expected)) is not None:
        error = InternalsChanged(difference)
        note_and_answer("stamps", _refusal(error))
        _warn(error)
        return
    note_and_answer("stamps")
    routes.activate(serves_http=_WRITE_EVENT in before)
    for target, hook in before.items():
        HookRegistry.register(target, hook, HookType.BEFORE)
    for target, hook in after.items():
        HookRegistry.register(target, hook, HookType.AFTER)


def _careful[**P](hook: Callable[P, None]) -> Callable[P, None]:
    """Wrap a hook so that one failure, caused by other internals of SGLang, disables all hooks with one warning.

    They stay disabled: a gap would shift the stamps of the tokens after it.
    """

    @functools.wraps(hook)
    def careful(*args: P.args, **kwargs: P.kwargs) -> None:
        stamps = args[0]
        assert isinstance(stamps, TokenStamps)
        if stamps.is_working:
            try:
                hook(*args, **kwargs)
            except _UNLIKE as error:
                stamps.is_working = False
                note("stamps", _refusal(error))
                _warn(error)

    return careful


class TokenStamps:
    """The hooks of one scheduler process.  Each takes the arguments of the hooked method and returns nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_working = True
        """Whether tokens are stamped.  Once False, it stays False."""
        # Invariant: changes only in ``after_update``, hence on the scheduler's thread and while no forward pass runs
        # (``before_pause``).  Otherwise a stamp could name weights that its pass did not use.
        self._version: str | None = None
        """The version of the weights in use; None until it is first needed."""
        self._still_since: float | None = None
        """The clock's time at the end of the last forward pass; None while the engine is not paused."""

    @_careful
    def after_run_batch(self, result: Any, scheduler: Any, batch: Any, *rest: Any, **named: Any) -> None:
        """Stamp the tokens of this forward pass.

        Now, because an update may come before SGLang reads the tokens.
        """
        # The pass may still be running on the GPU.  Only Python objects are touched here, so nothing waits for it.
        outputs = getattr(result, "logits_output", None)
        if outputs is None or not batch.spec_algorithm.is_none():  # speculation makes several tokens per pass
            return
        stamps = [self._serving(scheduler)] * len(batch.reqs)
        outputs.customized_info = {**(outputs.customized_info or {}), STAMPS: stamps}

    @_careful
    def after_update(self, result: Any, updater: Any, asked: Any) -> None:
        """Note the new version, and renew the cache keys of the waiting requests."""
        if not result.success or asked.weight_version is None:
            return
        if self._still_since is not None:
            result.message += f" {STOOD_STILL}{self._clock() - self._still_since:.6f}"
        self._version = asked.weight_version
        # Invariant: only requests in the queue get a new key, because they hold no prefix yet.  A running request keeps
        # its key: under a new one SGLang would file its prefix, computed with older weights, as current.
        for request in updater.scheduler.waiting_queue:
            self._renew_key(updater.scheduler, request)

    @_careful
    def before_queueing(self, scheduler: Any, request: Any, *rest: Any, **named: Any) -> None:
        """Renew the request's cache key, and send the tokens that a retracted request holds back.

        With the current key it reuses no prefix that older weights cached.
        """
        self._renew_key(scheduler, request)
        if request.is_retracted:
            _send_all(scheduler, request)

    @_careful
    def before_pause(self, scheduler: Any, asked: Any) -> None:
        """Wait for the forward pass that overlaps with the scheduler's work, because an update changes the weights.

        On GPUs SGLang 0.5.16 itself waits only until that pass has read the data that it shares with the scheduler.
        The caller gets the answer to its pause request before that.
        """
        # Invariant: ``copy_done`` is recorded behind the pass and the copy of its tokens.  This blocks the scheduler's
        # thread for one pass at most, and launches none meanwhile.
        if scheduler.enable_overlap:
            for _, pending in scheduler.result_queue:
                if pending.copy_done is not None:
                    pending.copy_done.synchronize()
        if self._still_since is None:  # already set if a failed update left the engine paused
            self._still_since = self._clock()

    @_careful
    def before_continuing(self, scheduler: Any, asked: Any) -> None:
        """Note that the engine is no longer paused."""
        self._still_since = None

    def _serving(self, scheduler: Any) -> str:
        if self._version is None:
            self._version = scheduler.server_args.weight_version
        return self._version

    def _renew_key(self, scheduler: Any, request: Any) -> None:
        if is_cache_key(request.extra_key):
            request.extra_key = cache_key(self._serving(scheduler))


class PackedEvents:
    """The hook of the process that serves HTTP."""

    def __init__(self) -> None:
        self._is_working = True

    def before_writing(self, event: Any, *rest: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return new arguments, with the packed event, for the hooked function; None keeps its arguments."""
        if not self._is_working or not isinstance(event, Mapping):
            return None
        try:
            packed = pack(event)
        except _UNLIKE as error:
            self._is_working = False
            _warn(error)
            return None
        return None if packed is None else ((packed, *rest), named)


def _send_all(scheduler: Any, request: Any) -> None:
    """Stream the tokens that wait for their chunk to fill.

    If the request is aborted while it is queued, SGLang's answer lacks them.
    """
    if len(request.output_ids) <= request.send_token_offset or not request.stream:
        return
    # Invariant: ``stream_output`` runs on this thread and has read the interval when it returns.  The request's own
    # value must be back then, or every later token would be sent as a chunk.
    params, interval = request.sampling_params, request.sampling_params.stream_interval
    params.stream_interval = 1
    try:
        scheduler.output_streamer.stream_output([request], request.return_logprob)
    finally:
        params.stream_interval = interval


def _refusal(error: Exception) -> str:
    return f"this SGLang is unlike 0.5.16 inside ({type(error).__name__}: {error})"


def _warn(error: Exception) -> None:
    logger.warning(
        "asyncrl: %s; weight versions may be known per chunk only, "
        "--weight-update-mode retract may reuse prefixes that older weights cached, and answers may come unpacked",
        _refusal(error),
    )
