"""A Ray session for one run: joined when a cluster is there, started on this machine otherwise, and taken down whole.

``ray.init`` must run on the main thread (calls from elsewhere hang after it when it did not), so the session is an
ordinary context around the event loop, not inside it.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import psutil

from asyncrl.errors import ServerFailed

logger = logging.getLogger(__name__)

STOP_GRACE_S = 3.0
"""For processes that were asked to end, before they are killed."""
STARTED_BY_HAND = Path("/tmp/ray/ray_current_cluster")
"""Where ``ray start`` leaves the address of its cluster."""


@contextmanager
def ray_session(num_cpus: int, closing: Callable[[], None]) -> Iterator[ModuleType]:
    """Give the connected ``ray`` module; end every process of the session afterwards.

    ``num_cpus`` is what a cluster started here offers at least (Ray counts logical CPUs; ranks and servers ask for one
    each).  ``closing`` is called first when the session ends: nothing may interrupt what follows.  Raises ServerFailed.
    """
    # Under ``uv run`` Ray would rebuild the environment for each worker.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray

    before, started = set(_descendants()), list[psutil.Process]()
    try:
        _connect(ray, num_cpus)
        yield ray
    finally:
        try:
            closing()
            # Listed first: a server whose parent is gone is no longer found below this process.
            started = [process for process in _descendants() if process not in before]
            ray.shutdown()
        finally:
            end(started)


def _connect(ray: ModuleType, num_cpus: int) -> None:
    """Join the cluster of ``RAY_ADDRESS`` or of ``ray start`` on this machine, else start one of our own."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ServerFailed(f"RAY_ADDRESS {address}: the driver must run on a node of the cluster (use ray job submit)")
    quietly = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}
    try:
        if address not in ("", "local") or (not address and STARTED_BY_HAND.exists()):
            ray.init(**quietly)
        else:
            cpus = max(num_cpus, os.cpu_count() or 1)
            ray.init(address="local", include_dashboard=False, num_cpus=cpus, **quietly)
    except Exception as error:  # Ray raises RuntimeError, ConnectionError, RayError and the bare Exception
        raise ServerFailed(f"Ray did not start: {str(error).strip().splitlines()[0]}") from error


def end(processes: list[psutil.Process]) -> None:
    """Ask processes to end, then kill what is left."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=STOP_GRACE_S)
    for process in stubborn:
        logger.warning("process %d does not end by itself and is killed", process.pid)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=STOP_GRACE_S)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
