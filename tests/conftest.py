"""Which tests one worker runs after another, where two work at once (``-n 2``).

one     servers, Ray, whole runs: each start takes both cores for seconds, and some tests look at the clock
other   file by file, the one that takes longest first, so that it is over before the whole runs begin
"""

import gc
import os
from functools import cache

import pytest
from hypothesis import settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from asyncrl.engines.cluster import actors

STARTS_MUCH = ("tests/contract", "tests/engines/cluster", "tests/engines/sglang/test", "tests/integration")
"""Folders whose tests must not run beside each other; files of ``contract`` also share their servers."""
FIRST = (
    "tests/contract",
    "tests/engines/megatron/train/test_parallel_training.py",
    "tests/engines/megatron/train/test_layouts.py",
)


settings.register_profile("no deadline", deadline=None)  # hypothesis' own is 200 ms for each example
settings.load_profile("no deadline")


class InTwo(LoadScopeScheduling):  # type: ignore[misc]  # xdist is untyped
    """What ``STARTS_MUCH`` is one piece of work, each other file one more."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "starts much" if path.startswith(STARTS_MUCH) else path


def pytest_configure() -> None:
    """Workers choose from different ports: some are listened on long after they were chosen."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    actors.PORTS = actors.PORTS[number :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> InTwo:
    """Asked by xdist."""
    return InTwo(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are, and move ``FIRST`` to the front.  The rest keeps its order."""
    for item in items:
        for mark in item.iter_markers("gpu"):
            wanted = mark.kwargs.get("count", 1)
            if wanted > num_gpus():
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPU{'s' if wanted > 1 else ''}"))
    items.sort(key=lambda item: next((n for n, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


@cache
def num_gpus() -> int:
    """The GPUs that torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def pytest_collection_finish() -> None:
    """What the imports made (300,000 objects with torch) is not looked through again at every full collection."""
    gc.collect()
    gc.freeze()
