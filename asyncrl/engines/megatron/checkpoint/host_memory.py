"""Host memory for the content of checkpoints, kept from one checkpoint to the next.

New memory costs more than the copy into it, because the kernel clears every page at its first use.
"""

import math
from collections.abc import Hashable, Sequence

import torch

from asyncrl.engines.megatron.setup.pinned import pin

BLOCK_BYTES = 256 * 2**20
"""Bytes per block.  A larger tensor gets a separate block."""
_ALIGNMENT = 64
"""Alignment of each tensor, in bytes: a cache line, and a multiple of every element's size."""


class CheckpointMemory:
    """Tensors in host memory by name, pinned where there is a GPU.  A name has one shape and type for good."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._used = 0
        """Bytes of the last block."""
        self._tensors: dict[Hashable, torch.Tensor] = {}
        self.failure: str | None = None
        """The reason why this memory lacks a part of the present checkpoint."""

    def tensor(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor ``name``, with whatever content it has."""
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = self._taken(math.prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))
        elif found.shape != torch.Size(shape) or found.dtype != dtype:
            raise AssertionError(f"{name} was {found.dtype} {tuple(found.shape)}, and is {dtype} {tuple(shape)}")
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in this memory."""
        where = tensor.data_ptr()
        return tensor.is_cpu and any(0 <= where - each.data_ptr() < each.numel() for each in self._blocks)

    def _taken(self, num_bytes: int) -> torch.Tensor:
        """Return ``num_bytes`` that no other tensor has, as a storage of exactly that size.

        Megatron copies a tensor whose storage is larger than the tensor.
        """
        if not self._blocks or self._used + num_bytes > self._blocks[-1].numel():
            self._blocks.append(torch.empty(max(BLOCK_BYTES, num_bytes), dtype=torch.uint8))
            pin(self._blocks[-1])
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return torch.from_numpy(self._blocks[-1].numpy()[start : start + num_bytes])
