"""Imports Megatron once, before pytest turns warnings into errors: importing it warns about absent libraries."""

import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

MANY_THREADS = 100

torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("asyncrl.engines.megatron.rank")
    importlib.import_module("megatron.core.models.mimo.optimizer")  # get_megatron_optimizer imports it when called


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the warnings of Megatron, and of a library that transformers imports: only they can mend them."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:::megatron"))
            item.add_marker(pytest.mark.filterwarnings("ignore::SyntaxWarning"))


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """A rank's gloo groups have threads of their own, which live until the models that know them are collected.

    There were 2,000 after two files, and the kernel had a quarter of the time.
    """
    yield
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.collect()
