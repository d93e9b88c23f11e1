"""Whether Triton kernels run here."""

import functools
import importlib.util

import torch
from torch import Tensor


def can_use_triton(like: Tensor) -> bool:
    """Return whether kernels can take the place of torch's operations on tensors like this one.

    Float32 keeps torch's operations, because it is chosen for exact results.
    """
    return like.is_cuda and like.dtype in (torch.bfloat16, torch.float16) and has_triton()


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
