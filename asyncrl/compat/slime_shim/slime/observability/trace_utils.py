"""slime's traces.  Nothing is recorded: asyncrl's timeline shows episodes and turns."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["TraceSpan", "build_sglang_meta_trace_attrs", "trace_event", "trace_function", "trace_span"]


class TraceSpan:
    """A span that forgets its attributes."""

    def set(self, key: str, value: Any) -> "TraceSpan":
        """Ignore an attribute."""
        return self

    def update(self, attrs: Mapping[str, Any] | None) -> "TraceSpan":
        """Ignore attributes."""
        return self

    set_attr = set
    update_attrs = update


@contextmanager
def trace_span(target: Any = None, name: str = "", **options: Any) -> Iterator[TraceSpan]:
    """Run the block."""
    yield TraceSpan()


def trace_function(name: Any = None, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that changes nothing."""
    return lambda function: function


def trace_event(target: Any = None, name: str = "", **options: Any) -> None:
    """Ignore an event."""


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of an answer of SGLang."""
    names = ("prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency")
    return {f"sglang_{name}": meta[name] for name in names if name in meta}
