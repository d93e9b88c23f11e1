"""The experts of every cached token, on the engine's device: a part of the plug-in for routes.

SGLang 0.5.16 keeps them in pinned host memory, four bytes an expert.  After each pass, the scheduler's thread waits for
two more copies and writes the rows by index, which delays the next pass of a small batch.  Here the device keeps them,
in one or two bytes an expert:

    a pass ends ──────────▶ its rows are written to their places, on the stream of the pass
    rows are asked for ───▶ those of all requests are gathered on the device, and copied to the host at once

Invariant: rows are read on the scheduler's thread, for positions whose pass it has processed.  It processes a pass
after an event that the pass's stream records later than the write, so that the read needs no other order.  A read
therefore has a separate stream: the scheduler's own stream waits for the pass that was started last, if that pass
reads prompts (SGLang's ``_apply_war_barrier``), and with it the thread would wait, and start the next pass late.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from asyncrl.internals import Internal

_CAPTURER = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer"
_BASE = "sglang.srt.state_capturer.base.BaseTopkCapturer"
_STORE = "asyncrl_routes"
"""Attribute of a capturer with the experts by place in the KV cache: places x layers x experts per token."""
_STREAM = "asyncrl_routes_stream"
"""Attribute of a capturer with the stream of its reads."""
_MOST_VIEWS = 8
"""Spans that are read as views, in one wait for the device."""
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in a model's configuration."""

INTERNALS = (
    Internal(
        name=f"{_CAPTURER}.__init__",
        parameters=("self", "model_config", "num_tokens", "max_running_requests", "num_fused_shared_experts", "device"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=f"{_BASE}.on_forward_end",
        parameters=("self", "forward_batch", "can_run_graph", "cuda_graph_batch", "no_copy_to_cpu"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=f"{_BASE}.get_topk",
        parameters=("self", "req_pool_idx", "seqlen", "req_to_token_pool", "start_len"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=f"{_CAPTURER}._get_local_slice",
        parameters=("self", "forward_batch", "can_run_graph", "cuda_graph_batch"),
        used_in=__name__,
    ),
    Internal(name=_CAPTURER, attributes=("num_layers", "topk_size"), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""


class Span(NamedTuple):
    """The positions of a request from ``start`` to the one before ``stop``, whose rows are read."""

    req_pool_idx: int
    start: int
    stop: int


def register() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_CAPTURER}.__init__", around_init, HookType.AROUND)
    HookRegistry.register(f"{_BASE}.on_forward_end", around_forward_end, HookType.AROUND)
    HookRegistry.register(f"{_BASE}.get_topk", around_get, HookType.AROUND)


def around_init(
    init: Callable[..., None], capturer: Any, model_config: Any, num_tokens: int, *rest: Any, **named: Any
) -> None:
    """Initialise a capturer of experts with its store on the device, and without one on the host."""
    import torch

    init(capturer, model_config, 0, *rest, **named)
    dtype = torch.uint8 if is_narrow(model_config.hf_text_config) else torch.int16
    sizes = num_tokens, capturer.num_layers, capturer.topk_size
    device = capturer.device_cache.buffer.device
    setattr(capturer, _STORE, torch.zeros(sizes, dtype=dtype, device=device))


def around_forward_end(
    end: Callable[..., Any],
    capturer: Any,
    forward_batch: Any,
    can_run_graph: bool,
    cuda_graph_batch: int | None,
    no_copy_to_cpu: bool = False,
) -> Any:
    """Write the rows of a pass to their places; SGLang has nothing left to copy."""
    store = vars(capturer).get(_STORE)
    if store is None:  # the capturer of another thing than experts
        return end(capturer, forward_batch, can_run_graph, cuda_graph_batch, no_copy_to_cpu)
    rows = capturer._get_local_slice(forward_batch, can_run_graph, cuda_graph_batch)  # noqa: SLF001 (no public way)
    store[forward_batch.out_cache_loc] = rows.to(store.dtype)
    return None


def around_get(
    get: Callable[..., Any],
    capturer: Any,
    req_pool_idx: int,
    seqlen: int,
    req_to_token_pool: Any,
    start_len: int = 0,
) -> Any:
    """Return the rows of a request's positions from ``start_len`` to the one before the last, on the host."""
    store = vars(capturer).get(_STORE)
    if store is None:
        return get(capturer, req_pool_idx, seqlen, req_to_token_pool, start_len)
    if start_len < 0:
        raise ValueError(f"{start_len=} must be non-negative")
    places = req_to_token_pool.req_to_token[req_pool_idx][min(start_len, seqlen - 1) : seqlen - 1]
    return store[places].cpu()


def read(capturer: Any, req_to_token_pool: Any, spans: Sequence[Span], layers: slice | list[int]) -> list[bytes]:
    """Return, for each span, its rows of ``layers`` in one or two bytes an expert."""
    store = vars(capturer)[_STORE]
    with _stream_of(capturer, store):
        places = _places(req_to_token_pool.req_to_token, spans)
        rows = store[:, layers][places] if isinstance(layers, slice) else store[places][:, layers]
        data = memoryview(rows.cpu().numpy().tobytes())
    size, parts, at = len(data) // len(places), [], 0
    for _, start, stop in spans:
        parts.append(bytes(data[at : at + (stop - start) * size]))
        at += (stop - start) * size
    return parts


def _stream_of(capturer: Any, store: Any) -> AbstractContextManager[Any]:
    """Return a context in which a GPU works in the stream of the reads, ahead of the kernels of passes."""
    import torch

    if not store.is_cuda:
        return nullcontext()
    if _STREAM not in vars(capturer):
        setattr(capturer, _STREAM, torch.cuda.Stream(store.device, priority=-1))  # type: ignore[no-untyped-call]
    return torch.cuda.stream(getattr(capturer, _STREAM))


def _places(table: Any, spans: Sequence[Span]) -> Any:
    """Return the places of the spans' positions, on the device.

    An index from the host waits for the device, and a view costs some microseconds.
    """
    import numpy as np
    import torch

    if len(spans) <= _MOST_VIEWS:
        return torch.cat([table[index, start:stop] for index, start, stop in spans])
    at = np.concatenate([np.arange(start, stop) + index * table.shape[1] for index, start, stop in spans])
    return table.view(-1)[torch.from_numpy(at).to(table.device)]


def is_narrow(config: Any) -> bool:
    """Return whether the model has at most 256 experts, whose ids fit in one byte."""
    count = next((found for name in _NUM_EXPERTS if (found := getattr(config, name, None))), None)
    return count is not None and count <= 256
