"""A Ray session for one run: joined if there is a cluster, otherwise started on this machine, and shut down completely.

``ray.init`` must run on the main thread; otherwise later calls from other threads hang.  The session is therefore an
ordinary context around the event loop, not inside it.
"""

import atexit
import ctypes
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import psutil

from asyncrl.engines.cluster.calls import INTERNALS as CALLS
from asyncrl.engines.cluster.placement import INTERNALS as PLACEMENT
from asyncrl.engines.cluster.ray_files import protect_token, session_folder
from asyncrl.engines.cluster.ray_health import own_parts
from asyncrl.engines.cluster.reaping.reaper_process import PROGRAM, Reaper, announce_end_at_once, reaped
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
    Internal(name="ray._private.ray_constants.ENABLE_RAY_CLUSTER", used_in=__name__),
    Internal(name="ray._private.services.get_node_ip_address", attributes=("ENABLE_RAY_CLUSTER",), used_in=__name__),
    Internal(
        name="ray._private.services.get_node",
        parameters=("gcs_address", "node_id"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="ray._private.node.Node.start_api_server",
        parameters=("self",),
        keywords=("include_dashboard", "raise_on_failure"),
        used_in=__name__,
    ),
    Internal(name="ray._private.node.Node.start_monitor", parameters=("self",), is_exact=True, used_in=__name__),
    Internal(name="ray._private.node.Node.start_log_monitor", parameters=("self",), is_exact=True, used_in=__name__),
    Internal(name="ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV", used_in=__name__),
    Internal(name="ray._common.utils.get_ray_address_file", attributes=("ray_current_cluster",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

EXTRAS = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start a process which a run does not need."""
START_S = 150.0
"""Limit in seconds for Ray's node to register, which takes 2 s on idle cores."""
ASK_EVERY_S = 0.1
"""Seconds between two looks for the node."""
STOP_GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
HOLD_EVERY_S = 0.002
"""Seconds between two restorations of the program's signal handlers while Ray shuts down."""
SHUTDOWN_S = 10.0
"""Seconds for Ray to end its processes, which takes it 2 s; processes left after that are ended here."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # opened here: a signal handler loads no library
_TRACKER = "multiprocessing.resource_tracker"
"""The module that Python's resource tracker runs; the fork server of reward workers starts one."""
STARTED_BY_HAND = Path("/tmp/ray/ray_current_cluster")
"""The file to which ``ray start`` writes the address of its cluster."""


@contextmanager
def ray_session(
    num_cpus: int, hold_signals: Callable[[], None], spared: Callable[[], Collection[int]] = frozenset
) -> Iterator[ModuleType]:
    """Yield the connected ``ray`` module; end every process of the session afterwards.

    ``num_cpus`` is the minimum that a cluster started here offers.  Ray counts logical CPUs, and each rank and server
    requests one.  ``hold_signals`` restores the program's signal handlers, which Ray replaces.  ``spared`` returns the
    ids of processes that are not the session's, although they may start during it; they live on with their children.

    Raises ServerFailed or InternalsChanged.
    """
    # Under ``uv run`` Ray would rebuild the environment for each worker.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray's default is 15: any other program on the machine would get CPU time before trainer and engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    check_internals(INTERNALS, CALLS, PLACEMENT)
    with reaped(spared) as reaper:
        yield from _connected(ray, reaper, num_cpus, hold_signals, spared)


def _connected(
    ray: ModuleType,
    reaper: Reaper,
    num_cpus: int,
    hold_signals: Callable[[], None],
    spared: Callable[[], Collection[int]],
) -> Iterator[ModuleType]:
    """Yield ``ray`` while it is connected.  The reaper only ends what this does not find."""
    before, started = set(_descendants()), list[psutil.Process]()
    try:
        with _no_handlers(ray):
            _connect(ray, num_cpus)
        hold_signals()  # Ray's core has installed handlers that end the program
        reaper.tell(own_parts())
        yield ray
    finally:
        try:
            hold_signals()
            # Listed first: a server whose parent is gone is no longer found below this process.
            started = [process for process in _descendants(spared()) if process not in before]
            _shut_down(ray, hold_signals)
        finally:
            end(started)


@contextmanager
def _no_handlers(ray: ModuleType) -> Iterator[None]:
    """Keep ``ray.init`` from setting a SIGTERM handler.

    Its handler raises wherever the program is, which could leave half a cluster and locks that stay taken.
    """
    utils = ray._private.utils  # noqa: SLF001 (there is no public way)
    # Invariant: ``ray.init`` looks the function up in this module at each call.  If it bound the name earlier, the
    # replacement would have no effect.  Main thread only: the module is patched for the whole process.
    theirs, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


@contextmanager
def _on_loopback(ray: ModuleType) -> Iterator[None]:
    """Have ``ray.init`` start its cluster at 127.0.0.1, where it listens on the loopback interface alone.

    Ray replaces a given 127.0.0.1 by the address of the default route and then listens on every interface, except where
    it knows no clusters, as on macOS.
    """
    constants = ray._private.ray_constants  # noqa: SLF001 (there is no public way)
    # Invariant: main thread only, and only while ``ray.init`` runs: the module is patched for the whole process.
    theirs, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = theirs


def _connect(ray: ModuleType, num_cpus: int) -> None:
    """Join the cluster of ``RAY_ADDRESS`` or of ``ray start`` on this machine, or start a new one."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise ServerFailed(f"RAY_ADDRESS {address}: the driver must run on a node of the cluster (use ray job submit)")
    quietly = {"log_to_driver": False, "logging_level": logging.WARNING, "configure_logging": False}
    try:
        if address not in ("", "local") or (not address and STARTED_BY_HAND.exists()):
            ray.init(**quietly)
        else:
            cpus = max(num_cpus, os.cpu_count() or 1)
            protect_token()
            folder = str(session_folder())
            with _on_loopback(ray), _without_extras(ray), _patiently(ray):
                ray.init(address="local", include_dashboard=False, num_cpus=cpus, _temp_dir=folder, **quietly)
    except Exception as error:  # Ray raises RuntimeError, ConnectionError, RayError and the bare Exception
        raise ServerFailed(f"Ray did not start: {str(error).strip().splitlines()[0]}") from error


@contextmanager
def _without_extras(ray: ModuleType) -> Iterator[None]:
    """Have ``ray.init`` start no autoscaler, no API server, and no process that sends logs of workers to the driver.

    A run asks for no machine, submits no job to its own cluster, and takes no log from Ray.  The three processes cost
    4 s of CPU time and 300 MB.
    """
    node = ray._private.node.Node  # noqa: SLF001 (there is no public way)
    # Invariant: main thread only, and only while ``ray.init`` runs: the class is patched for the whole process.
    theirs = {name: getattr(node, name) for name in EXTRAS}
    for name in EXTRAS:
        setattr(node, name, lambda self, **_: None)
    try:
        yield
    finally:
        for name, method in theirs.items():
            setattr(node, name, method)


@contextmanager
def _patiently(ray: ModuleType) -> Iterator[None]:
    """Have ``ray.init`` wait ``START_S`` seconds for its node; Ray's limit of 30 s is too short on a busy machine."""
    services = ray._private.services  # noqa: SLF001 (there is no public way)
    # Invariant: main thread only, and only while ``ray.init`` runs: the module is patched for the whole process.
    theirs = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return theirs(gcs_address, node_id)
            except RuntimeError:  # the node has not registered yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(ASK_EVERY_S)

    services.get_node = get_node
    try:
        yield
    finally:
        services.get_node = theirs


def _shut_down(ray: ModuleType, hold_signals: Callable[[], None]) -> None:
    """Shut Ray down in a thread, while this one keeps restoring the program's signal handlers.

    When Ray's core ends, it resets SIGTERM to its default in C, seconds before the rest has ended.  About a millisecond
    without a handler remains.  A program that is ended within it leaves the rest to Ray's reaper, and a shell sees the
    same exit code.
    """
    ended: Future[None] = Future()

    def shut_down() -> None:
        try:
            ray.shutdown()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            ended.set_exception(error)
        else:
            ended.set_result(None)

    # Invariant: this is the main thread, the only one in which Python sets signal handlers.  Ray gets the other one.
    Thread(target=shut_down, name="ray-shutdown", daemon=True).start()
    deadline = time.monotonic() + SHUTDOWN_S
    while not wait([ended], timeout=HOLD_EVERY_S).done and time.monotonic() < deadline:
        hold_signals()
    hold_signals()
    if not ended.done():
        logger.warning("Ray did not shut down within %g s; its remaining processes are ended now", SHUTDOWN_S)
        atexit.unregister(ray.shutdown)  # it would wait for the shutdown that does not end
        return
    ended.result()


def end(processes: list[psutil.Process]) -> None:
    """Send SIGTERM to processes, and SIGKILL after ``STOP_GRACE_S`` seconds to those still running."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(processes, timeout=STOP_GRACE_S)
    for process in stubborn:
        logger.warning("process %d did not end after SIGTERM and is killed", process.pid)
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=STOP_GRACE_S)


def kill_descendants() -> int:
    """Kill every process below this one, trackers included, and return their number.  Takes a few seconds at most.

    The reaper lives on: it ends processes of the session that are not below this one any more.  For a program that ends
    at once: a signal handler may call it, because it takes no lock and logs nothing.
    """
    announce_end_at_once()
    # Processes whose parents die from now on become children of this one, so none escapes the next look.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    killed, deadline = set[int](), time.monotonic() + STOP_GRACE_S
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [process for process in _descendants() if _is_running(process) and not _has(process, PROGRAM)]
        if not left:
            break
        for process in left:
            with suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        time.sleep(0.02)
    return len(killed)


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:  # it has ended
        return False


def _descendants(spared: Collection[int] = ()) -> list[psutil.Process]:
    """Return the processes below this one, without those in ``spared`` and their descendants.

    Python's resource tracker is left out: it ignores SIGTERM, and ends with this process, whose shared memory it frees.
    """
    everyone = psutil.Process().children(recursive=True)
    others: set[psutil.Process] = set()
    for process in everyone:
        if process.pid in spared:
            with suppress(psutil.NoSuchProcess):
                others |= {process, *process.children(recursive=True)}
    return [process for process in everyone if process not in others and not _has(process, _TRACKER)]


def _has(process: psutil.Process, text: str) -> bool:
    """Whether ``text`` is in a process's command line."""
    try:
        return any(text in word for word in process.cmdline())
    except psutil.Error:  # it has ended
        return False
