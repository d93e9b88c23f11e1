"""Pinned host memory, from and to which a GPU copies at the rate of the bus."""

import logging
from contextlib import suppress
from typing import Any

import torch

from asyncrl.internals import Internal

INTERNALS = (Internal(name="torch.cuda.cudart", used_in=__name__),)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)


def pin(host: torch.Tensor) -> bool:
    """Pin ``host``, which holds bytes, by registering it with CUDA, and return whether that succeeded.

    torch's pinned allocator would take up to twice the memory, the next power of two.
    """
    if not torch.cuda.is_available():
        return False
    cudart: Any = torch.cuda.cudart  # torch has no types for it
    error = int(cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))
    if error:
        logger.warning("could not pin %d bytes of host memory (CUDA error %d): copies are slower", len(host), error)
        with suppress(RuntimeError):  # the next kernel raises the error again, and CUDA then forgets it
            torch.zeros(1, device="cuda")
    return not error


def unpin(host: torch.Tensor) -> None:
    """Undo ``pin``, before the memory is freed."""
    cudart: Any = torch.cuda.cudart
    cudart().cudaHostUnregister(host.data_ptr())
