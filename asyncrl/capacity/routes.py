"""The host memory of routes: the experts that engines chose for each token (docs/guides/moe.md)."""

from dataclasses import dataclass

from asyncrl.models.shape import ModelShape

RECORD_BYTES = 4
"""Bytes of one expert in SGLang's record, an int32 (SGLang 0.5.16, ``BaseHostCache``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteMemory:
    """Bytes of host memory."""

    engine: float
    """Bytes that the ranks of one engine pin together."""
    batch: float
    """Bytes of a batch's routes if all samples have the maximum length."""


def route_memory(
    shape: ModelShape, *, gpus_per_engine: int, kv_tokens: int, page_size: int, batch_tokens: int
) -> RouteMemory | None:
    """Compute the memory of a mixture's routes; None for a dense model.

    Each rank of an engine records the experts of all layers, dense ones included, for each place of its KV cache.
    Samples have those of the mixture layers, in one byte for each expert or in two above 256 experts.
    """
    experts = shape.experts
    if experts is None:
        return None
    recorded = shape.num_layers * experts.num_chosen * RECORD_BYTES
    sent = (shape.num_layers - experts.num_dense_layers) * experts.num_chosen * (1 if experts.num_experts <= 256 else 2)
    return RouteMemory(
        engine=float(gpus_per_engine * (kv_tokens + page_size) * recorded), batch=float(batch_tokens * sent)
    )
