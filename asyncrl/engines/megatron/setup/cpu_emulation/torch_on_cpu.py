"""A ``torch`` module for Megatron's modules, whose factory functions read the literal ``device="cuda"`` as the CPU."""

import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


class _TorchOnCpu(types.ModuleType):
    """The module that Megatron's modules see as ``torch``; all other code keeps torch's own factory functions.

    A TorchFunctionMode would be less code, but it is not active in the backward pass of activation recomputation.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        # Rotary positions ask for pinned memory under context parallelism; without a GPU there is no use for it.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


TORCH = _TorchOnCpu("torch")
# Invariant: only the names set here differ from torch's.  They are bound now, so a later patch of torch's own factory
# function does not reach Megatron.
for _name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like"):
    setattr(TORCH, _name, _on_cpu(getattr(torch, _name)))
