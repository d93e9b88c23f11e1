"""The import of Megatron in a process that trains on a CPU, in half of the time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from asyncrl.quick_imports import quick_imports

UNUSED = ("flash_attn", "flashinfer", "wandb")
"""Libraries that Megatron imports if it can, and that a trainer on a CPU does not use: 2 s of CPU time."""


@contextmanager
def cpu_imports() -> Iterator[None]:
    """Import Megatron without the ``UNUSED`` libraries, and with functions that are not compiled.

    ``emulate_cuda`` forbids compilation anyway; but a call of ``torch.compile`` imports the compiler, in 1 s.
    """
    compiled = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        with quick_imports(*UNUSED):
            yield
    finally:
        torch.compile = compiled


def _as_it_is(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """The decorator with and without options."""
    return function or _as_it_is
