"""The settings of conftests whose tests run Megatron in the tests' process."""

import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.megatron_imports import megatron_imports

MANY_THREADS = 1000


def import_megatron() -> None:
    """Import Megatron before pytest turns warnings into errors: importing it warns about absent libraries."""
    torch.set_num_threads(1)
    with megatron_imports():
        importlib.import_module("asyncrl.engines.megatron.rank")
        importlib.import_module("megatron.core.models.mimo.optimizer")  # get_megatron_optimizer imports it when called


def ignore_warnings_of_megatron(items: list[pytest.Item], folder: Path) -> None:
    """Ignore the warnings of Megatron, and of a library that transformers imports, in the tests of ``folder``."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:::megatron"))
            item.add_marker(pytest.mark.filterwarnings("ignore::SyntaxWarning"))


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Collect the models of ended ranks, whose gloo groups each have two threads.

    Most of them live on: hooks of Megatron's ``DistributedDataParallel`` hold it in C++, where nothing is collected.
    """
    yield
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.collect()
