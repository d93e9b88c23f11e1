"""The order of tests, and their division between two workers (``-n 2``).

one     tests of ``SERVER_TESTS``, one after the other, contract first and whole runs last
other   all other files, the longest first, so that they are done before the whole runs begin
"""

import gc
import os
from functools import cache

import pytest
from hypothesis import settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from asyncrl.engines.cluster import actors

SERVER_TESTS = (
    "tests/contract/",
    "tests/engines/cluster/",
    "tests/engines/sglang/test_",
    "tests/engines/test_server_process.py",
    "tests/integration/",
)
"""Beginnings of the paths of tests that start servers, Ray or whole runs, and never run at the same time.

Each start takes both cores for seconds, and some of these tests read the clock.  The files of ``contract`` share a
server, as do those of ``engines/sglang``.
"""
FIRST = (
    "tests/contract/",
    "tests/engines/megatron/train/test_parallel_training.py",
    "tests/engines/megatron/train/test_layouts.py",
)
"""Beginnings of the paths of the tests that start first: the server tests, and the longest of the others."""


settings.register_profile("no deadline", deadline=None)  # hypothesis' default is 200 ms for each example
settings.load_profile("no deadline")


class ServersThenFiles(LoadScopeScheduling):  # type: ignore[misc]  # xdist is untyped
    """All tests of ``SERVER_TESTS`` are one unit of work; every other file is one more."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "servers" if path.startswith(SERVER_TESTS) else path


def pytest_configure() -> None:
    """Give each worker different ports: a server may listen on its port long after the port was chosen."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    actors.PORTS = actors.PORTS[number :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ServersThenFiles:
    """Hook of xdist."""
    return ServersThenFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are, and move ``FIRST`` to the front.  All others keep their order."""
    for item in items:
        for mark in item.iter_markers("gpu"):
            wanted = mark.kwargs.get("count", 1)
            if wanted > num_gpus():
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPU{'s' if wanted > 1 else ''}"))
    items.sort(key=lambda item: next((n for n, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


@cache
def num_gpus() -> int:
    """The number of GPUs that torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def pytest_collection_finish() -> None:
    """Exclude the objects of imports (300,000 with torch) from every later garbage collection."""
    gc.collect()
    gc.freeze()
