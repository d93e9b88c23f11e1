"""The order of tests, and their division between three workers (``-n 3``) of a machine with two cores.

one       tests of ``SERVER_TESTS``, one after the other, contract first and whole runs last
others    all other files, the longest first; when they are done, those of ``LAST``, while the first worker ends

The other workers yield the cores to the first one, because some of its tests read the clock.
"""

import atexit
import gc
import os
from functools import cache
from importlib import import_module

import pytest
from hypothesis import settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from asyncrl.quick_imports import quick_imports

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
LAST = (
    "tests/integration/test_trainer_restarts.py",
    "tests/integration/test_episode_clients.py",
    "tests/integration/test_notebook.py",
    "tests/integration/test_episodes.py",
    "tests/integration/test_evaluations.py",
    "tests/integration/test_guides.py",
    "tests/integration/test_slime_generate.py",
)
"""Whole runs that do not read the clock, and may share the machine with those of other workers; longest first."""
ONE_BY_ONE = ("tests/integration/test_guides.py",)
"""Files of ``LAST`` whose tests share nothing, so that several workers may have them."""

YIELDS = 5
"""The niceness of workers without server tests."""
_has_yielded = False

# numpy's threads wait for work in a loop, in every process of the tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

gc.disable()  # until all tests are imported: a collection sees the objects of all modules before it
if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # last: a worker takes ten seconds to free its modules, one by one
    # Some test of every worker imports this.
    with quick_imports():
        import_module("transformers.utils.import_utils")

settings.register_profile("no deadline", deadline=None)  # hypothesis' default is 200 ms for each example
settings.load_profile("no deadline")


class ServersThenFiles(LoadScopeScheduling):  # type: ignore[misc]  # xdist is untyped
    """All tests of ``SERVER_TESTS`` without ``LAST`` are one unit of work; every other file is one more."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path in ONE_BY_ONE:
            return nodeid
        return "servers" if path.startswith(SERVER_TESTS) and path not in LAST else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ServersThenFiles:
    """Hook of xdist."""
    return ServersThenFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are, and move ``FIRST`` to the front, ``LAST`` to the end."""
    for item in items:
        for mark in item.iter_markers("gpu"):
            wanted = mark.kwargs.get("count", 1)
            if wanted > num_gpus():
                item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPU{'s' if wanted > 1 else ''}"))
    items.sort(key=lambda item: _place(item.nodeid))


def _place(name: str) -> int:
    """The rank of a test in the order; equal ranks keep their order."""
    places = {path: place for place, path in enumerate((*FIRST, None, *LAST)) if path is not None}
    return next((place for path, place in places.items() if name.startswith(path)), len(FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the first other test of a worker give its process, and all that it starts, a lower priority."""
    global _has_yielded
    if hasattr(item.config, "workerinput") and not _has_yielded and not item.nodeid.startswith(SERVER_TESTS):
        _has_yielded = True
        os.nice(YIELDS)


@cache
def num_gpus() -> int:
    """The number of GPUs that torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def pytest_collection_finish() -> None:
    """Exclude the objects of imports (300,000 with torch) from later garbage collections, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 100)
