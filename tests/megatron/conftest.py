"""Imports Megatron once, before pytest turns warnings into errors: importing it warns about absent libraries."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("asyncrl.engines.megatron.rank")
    importlib.import_module("megatron.core.models.mimo.optimizer")  # get_megatron_optimizer imports it when called


def pytest_collection_modifyitems(items):
    """What Megatron, and a library that transformers imports, warn about when they are used is theirs to mend."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:::megatron"))
            item.add_marker(pytest.mark.filterwarnings("ignore::SyntaxWarning"))
