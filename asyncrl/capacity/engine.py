"""The memory of an SGLang server on each of its GPUs, and the capacity of its KV cache.

    memory = weights + KV cache + memory that SGLang leaves free (1 - mem-fraction-static)

The last part is for activations, CUDA graphs and, later, the two buffers of weight updates.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.capacity.layout import attention_copies
from asyncrl.config.areas import FlagWords
from asyncrl.config.areas.ranges import must
from asyncrl.errors import ConfigError
from asyncrl.models.shape import ModelShape
from asyncrl.models.sizes import Size, attention_size, fp8_bytes, fp8_size, model_size, vocabulary_size

MEBI = 1024**2
_SIZES = (
    (20, 2048, (8, 8)),
    (35, 2048, (24, 80)),
    (60, 4096, (32, 160)),
    (160, 8192, (256, 512)),
    (float("inf"), 16384, (512, 512)),
)
"""SGLang 0.5.16, ``ServerArgs._handle_gpu_memory_settings``.  A row applies to GPUs below its number of GiB.  It has
the tokens of a prefill chunk, and the largest batch of a CUDA graph with fewer than 4 GPUs and with at least 4."""
UPDATE_BUFFERS = 2
"""The number of buffers of ``--update-weight-buffer-size``, see ``direct``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on one GPU of an engine."""

    weights: float
    free: float
    """Bytes that SGLang leaves free."""
    update_buffers: float
    """Bytes of the update buffers, which come out of ``free``."""
    limit: float
    token_bytes: float
    """Bytes of the KV cache for one token."""
    attention_copies: int
    """Copies of the attention within the engine, which have separate KV caches (SGLang's DP attention)."""
    max_tokens: int | None
    """The user's limit on the tokens in the KV cache; None: no limit."""

    @property
    def kv_cache(self) -> float:
        """Bytes of the KV cache: the remaining memory, or less by the user's limit.  Below 0 the weights do not fit."""
        room = self.limit - self.weights - self.free
        return room if self.max_tokens is None else min(room, self.max_tokens * self.token_bytes)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit in the KV cache of one copy of the attention."""
        return max(0, int(self.kv_cache / self.token_bytes))


def engine_memory(
    shape: ModelShape,
    *,
    gpus_per_engine: int,
    limit: float,
    weight_bytes: int,
    flags: Mapping[str, FlagWords],
    update_buffer_size: int,
) -> EngineMemory:
    """Estimate the memory of a server on ``gpus_per_engine`` GPUs of ``limit`` bytes each.

    ``flags`` are the user's ``--sglang-`` flags.  Raises ConfigError if the value of one that is used is not a number.
    """
    fraction = _number(flags, "mem-fraction-static")
    tokens = _number(flags, "max-total-tokens")
    copies = attention_copies(flags)
    cache_bytes = 1 if str(flags.get("kv-cache-dtype", "auto")).startswith("fp8") else weight_bytes
    return EngineMemory(
        weights=_on_each(model_size(shape) - fp8_size(shape), gpus_per_engine) * weight_bytes
        + _on_each(fp8_size(shape), gpus_per_engine) * fp8_bytes(shape)
        + _further_copies(shape, weight_bytes) * (copies - 1) / gpus_per_engine,
        free=_left_free(limit, gpus_per_engine, copies, flags) if fraction is None else (1 - fraction) * limit,
        update_buffers=UPDATE_BUFFERS * update_buffer_size,
        limit=limit,
        token_bytes=_cached_per_token(shape, max(1, gpus_per_engine // copies)) * cache_bytes,
        attention_copies=copies,
        max_tokens=None if tokens is None else int(tokens),
    )


def _on_each(size: Size, gpus_per_engine: int) -> float:
    """Count the parameters on one GPU of an engine."""
    return size.whole + (size.split + size.experts) / gpus_per_engine


def _further_copies(shape: ModelShape, weight_bytes: int) -> float:
    """Return the bytes of one more copy of the attention, with the embedding, over all of its GPUs.

    Norms and other narrow weights are left out: every GPU has them anyway.
    """
    attention = attention_size(shape).split * shape.num_layers
    each = fp8_bytes(shape) if shape.fp8_block else weight_bytes
    return attention * each + vocabulary_size(shape).split * weight_bytes


def _cached_per_token(shape: ModelShape, num_gpus: int) -> int:
    """Count the elements of one token in the KV cache of one of ``num_gpus`` GPUs that share the attention.

    The GPU has its share of the KV heads, at least one.  Latent attention's narrow vector is on every GPU.
    """
    if shape.latent is not None:
        return shape.num_layers * (shape.latent.key_value_rank + shape.latent.rotary_dim)
    heads = max(1, shape.num_query_groups // num_gpus)
    return shape.num_layers * 2 * heads * shape.head_dim


def _left_free(limit: float, gpus_per_engine: int, copies: int, flags: Mapping[str, FlagWords]) -> float:
    """Return the bytes that SGLang leaves free by default, without ``--sglang-mem-fraction-static``.

    SGLang adds up 512 MiB for its own data, 1.5 MiB for each token of a prefill chunk, 128 MiB for each of the engine's
    GPUs, and 2 MiB for each answer of the largest graph.  With several copies of the attention, an answer of that graph
    takes 3 MiB more for each copy, or 4.5 MiB in graphs of more than 300 answers.  On GPUs above 60 GiB it leaves at
    least 10 GiB.  It leaves less if it measures graphs first.
    """
    chunk, batches = next((chunk, batches) for below, chunk, batches in _SIZES if limit < below * 1024 * MEBI)
    batch = _largest_graph(flags) or batches[gpus_per_engine >= 4]
    mebis = 512 + 1.5 * chunk + 128 * gpus_per_engine + 2 * batch
    if copies > 1:
        mebis += (4.5 if batch > 300 else 3) * batch * copies
    return max(mebis, 10 * 1024 if limit > 60 * 1024 * MEBI else 0) * MEBI


def _largest_graph(flags: Mapping[str, FlagWords]) -> int | None:
    """Return the largest batch of a CUDA graph that the flags name, as a list or a limit; None without one.

    A list takes precedence over a limit, and the names of SGLang 0.5.16 over the ones before.
    """
    for name in ("cuda-graph-bs-decode", "cuda-graph-bs", "cuda-graph-max-bs-decode", "cuda-graph-max-bs"):
        given = flags.get(name)
        words = given if isinstance(given, tuple) else (str(given),)
        if sizes := [int(word) for word in words if word.isdecimal()]:
            return max(sizes)
    return None


def _number(flags: Mapping[str, FlagWords], name: str) -> float | None:
    if name not in flags:
        return None
    given = flags[name]
    try:
        return float(given if isinstance(given, str) else "")
    except ValueError:
        raise ConfigError(f"--sglang-{name} must be a number, got {given}") from None


def engine_problems(memory: EngineMemory, *, gpus_per_engine: int, longest: int) -> list[str]:
    """Return one line for each reason why a server cannot run, or cannot hold one answer of ``longest`` tokens."""
    gpus = f"{gpus_per_engine} GPU{'s' if gpus_per_engine > 1 else ''} of {memory.limit / 1e9:g} GB (gpu-memory-gb)"
    if memory.limit < memory.weights + memory.free:
        return [
            f"an engine does not fit on {gpus}: {memory.weights / 1e9:.1f} GB of weights per GPU and "
            f"{memory.free / 1e9:.1f} GB that SGLang leaves free; give more GPUs with rollout-num-gpus-per-engine"
        ]
    return must(
        memory.kv_tokens >= longest,
        f"the KV cache of an engine on {gpus} holds {memory.kv_tokens:,} tokens, one answer with its prompt may have "
        f"{longest:,}; give more GPUs with rollout-num-gpus-per-engine",
    ) + must(
        memory.free >= memory.update_buffers,
        f"sglang-mem-fraction-static leaves {memory.free / 1e9:.1f} GB free on {gpus}, and weight updates take "
        f"{memory.update_buffers / 1e9:.1f} GB (twice update-weight-buffer-size); lower one of the flags",
    )
