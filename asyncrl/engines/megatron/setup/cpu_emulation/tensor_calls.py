"""Tensor methods whose CUDA results Megatron expects, replaced for the whole process."""

import sys
from typing import Any

import torch

from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
        attributes=("torch.cuda.FloatTensor",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
        attributes=("torch.cuda.FloatTensor",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32",
        attributes=("torch.cuda.FloatTensor",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


def replace() -> None:
    """Install the stand-ins for the whole process."""
    real_type = torch.Tensor.type

    # Invariant: the result differs only for a caller in megatron.core.optimizer.  The caller is looked up one frame
    # above, so no decorator may wrap this function.
    def type_as_on_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizer groups parameters by comparing type() with 'torch.cuda.FloatTensor' (optimizer/optimizer.py).
        answer = real_type(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001
        asked = not args and not kwargs and caller.startswith("megatron.core.optimizer")
        return answer.replace("torch.", "torch.cuda.", 1) if asked else answer

    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign,assignment]
    # Megatron calls .cuda() on the last pipeline stage's copy of a tied embedding
    # (models/common/language_module/language_module.py).
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
