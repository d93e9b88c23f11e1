"""The import of Megatron, by tests and by the processes that they start."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncrl.engines.megatron.setup.cpu_imports import cpu_imports
from asyncrl.quick_imports import quick_imports


@contextmanager
def megatron_imports() -> Iterator[None]:
    """Import Megatron as a rank does, without its warnings about absent libraries."""
    with warnings.catch_warnings(), quick_imports() if torch.cuda.is_available() else cpu_imports():
        warnings.simplefilter("ignore")
        yield
