"""The import of Megatron, by tests and by the processes that they start."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.engines.megatron import UNUSED_ON_CPU
from asyncrl.quick_imports import cpu_imports, quick_imports


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Import Megatron as a rank does, without its warnings about absent libraries."""
    with warnings.catch_warnings(), quick_imports() if torch.cuda.is_available() else cpu_imports(*UNUSED_ON_CPU):
        warnings.simplefilter("ignore")
        yield
