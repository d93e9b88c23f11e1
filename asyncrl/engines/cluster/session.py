"""A Ray session for one run: joined when a cluster is there, started on this machine otherwise, and taken down whole.

``ray.init`` must run on the main thread (calls from elsewhere hang after it when it did not), so the session is an
ordinary context around the event loop, not inside it.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import ModuleType

import psutil

from asyncrl.engines.cluster.calls import INTERNALS as CALLS
from asyncrl.engines.cluster.placement import INTERNALS as PLACEMENT
from asyncrl.errors import ServerFailed
from asyncrl.internals import Internal, check_internals

INTERNALS = (
    Internal(
        name="ray._private.utils.set_sigterm_handler", parameters=("sigterm_handler",), is_exact=True, used_in=__name__
    ),
    Internal(
        name="ray._private.worker.init",
        keywords=("address", "num_cpus", "include_dashboard", "configure_logging", "logging_level", "log_to_driver"),
        attributes=("set_sigterm_handler",),
        used_in=__name__,
    ),
    Internal(name="ray._private.worker.shutdown", used_in=__name__),
    Internal(name="ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV", used_in=__name__),
    Internal(name="ray._common.utils.get_ray_address_file", attributes=("ray_current_cluster",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

STOP_GRACE_S = 3.0
"""For processes that were asked to end, before they are killed."""
HOLD_EVERY_S = 0.002
SHUTDOWN_S = 10.0
"""For Ray to end its processes, which takes it 2 s; what is left then is ended by us."""
STARTED_BY_HAND = Path("/tmp/ray/ray_current_cluster")
"""Where ``ray start`` leaves the address of its cluster."""


@contextmanager
def ray_session(num_cpus: int, hold_signals: Callable[[], None]) -> Iterator[ModuleType]:
    """Give the connected ``ray`` module; end every process of the session afterwards.

    ``num_cpus`` is what a cluster started here offers at least (Ray counts logical CPUs; ranks and servers ask for one
    each).  ``hold_signals`` puts the program's signal handlers back in place, which Ray takes away.

    Raises ServerFailed or InternalsChanged.
    """
    # Under ``uv run`` Ray would rebuild the environment for each worker.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray runs its workers at 15: beside any other program on the machine, trainer and engines would get what it leaves.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    check_internals(INTERNALS, CALLS, PLACEMENT)
    before, started = set(_descendants()), list[psutil.Process]()
    try:
        with _no_handlers(ray):
            _connect(ray, num_cpus)
        hold_signals()  # its core came with handlers of its own, which end the program
        yield ray
    finally:
        try:
            hold_signals()
            # Listed first: a server whose parent is gone is no longer found below this process.
            started = [process for process in _descendants() if process not in before]
            _shut_down(ray, hold_signals)
        finally:
            end(started)


@contextmanager
def _no_handlers(ray: ModuleType) -> Iterator[None]:
    """``ray.init`` would have SIGTERM raise wherever it happens to be: half a cluster, and locks that stay taken."""
    utils = ray._private.utils  # noqa: SLF001 (there is no public way)
    # Invariant: ``ray.init`` looks the function up here at each call.  A name bound earlier would escape.
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


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


def _shut_down(ray: ModuleType, hold_signals: Callable[[], None]) -> None:
    """In a thread, so that this one can put its handlers back.

    Ray's core, when it ends, sets SIGTERM to its default behind Python's back, seconds before the rest has ended.
    About a millisecond without a handler remains; who is ended in it leaves the rest to Ray's reaper, and the exit
    code is the same to a shell.
    """
    ended: Future[None] = Future()

    def shut_down() -> None:
        try:
            ray.shutdown()
        except BaseException as error:  # noqa: BLE001 (handed to the thread that waits)
            ended.set_exception(error)
        else:
            ended.set_result(None)

    # Python sets handlers in the main thread only, so the shutdown has the other one.
    Thread(target=shut_down, name="ray-shutdown", daemon=True).start()
    deadline = time.monotonic() + SHUTDOWN_S
    while not wait([ended], timeout=HOLD_EVERY_S).done and time.monotonic() < deadline:
        hold_signals()
    hold_signals()
    if not ended.done():
        logger.warning("Ray did not end within %g s; its processes are ended for it", SHUTDOWN_S)
        atexit.unregister(ray.shutdown)  # it would wait for the one that does not end
        return
    ended.result()


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
