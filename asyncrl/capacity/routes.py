"""The memory of routes: the experts that engines chose for each token (docs/guides/moe.md)."""

from dataclasses import dataclass

from asyncrl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMemory:
    """Bytes of routes."""

    engine: float
    """Bytes on each GPU of an engine, out of the memory that SGLang leaves free."""
    batch: float
    """Bytes of host memory for a batch's routes if all samples have the maximum length."""


def route_memory(shape: ModelShape, *, kv_tokens: int, page_size: int, batch_tokens: int) -> RouteMemory | None:
    """Compute the memory of a mixture's routes; None for a dense model.

    Each GPU of an engine records the experts of all layers, dense ones included, for each place of its KV cache
    (``engines/sglang/plugin/route_store.py``).  Samples have those of the mixture layers.
    """
    experts = shape.experts
    if experts is None:
        return None
    of_layer = experts.num_chosen * (1 if experts.num_experts <= 256 else 2)
    return RouteMemory(
        engine=float((kv_tokens + page_size) * shape.num_layers * of_layer),
        batch=float(batch_tokens * (shape.num_layers - experts.num_dense_layers) * of_layer),
    )
