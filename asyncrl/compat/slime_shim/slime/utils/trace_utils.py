"""The traces under their name before 2026-08."""

from ..observability.trace_utils import (
    TraceSpan,
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)

__all__ = ["TraceSpan", "build_sglang_meta_trace_attrs", "trace_event", "trace_function", "trace_span"]
