"""The KV slot allocator of the CPU platform; see ``cpu_platform``."""

from typing import Any

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator",
        parameters=("size",),
        keywords=("dtype", "device", "kvcache", "need_sort"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


class TokenAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]  # sglang is untyped
    """The stock allocator with the signature of an out-of-tree one: it takes a page size, which must be 1."""

    def __init__(self, size: int, *, page_size: int, **rest: Any) -> None:
        if page_size != 1:
            raise ValueError(f"page-size must be 1 on a CPU, got {page_size}")
        super().__init__(size, **rest)
