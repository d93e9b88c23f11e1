"""The end of the Ray processes on which a run depends: GCS, which knows all actors, and this machine's raylet.

Ray itself lets a driver work on for a minute after GCS has ended, and then ends it from C++: no ``finally`` runs, and
no error is shown.  After the raylet's end it does so at once.

    a cluster of this run       the kernel reports their end as it happens (pidfd); where it may not, a look each second
    a cluster that was joined   a connection to each of their ports once a second, until all fail for UNREACHABLE_S
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Mapping, Sequence
from types import ModuleType

import psutil

from asyncrl.errors import plainly
from asyncrl.event_loop import Deadline, loop_time
from asyncrl.task_groups import TaskGroup

NAMES = {"gcs_server": "GCS", "raylet": "raylet"}
"""Names of Ray's processes in messages, by the names of their programs."""
TRY_EVERY_S = 1.0
TRY_S = 1.0
"""Seconds for one connection."""
UNREACHABLE_S = 40.0
"""Seconds of failed connections after which a process of a joined cluster counts as ended.

A cluster with fault tolerance restarts its GCS within that time.  Ray ends the driver after 60 s, so that some seconds
remain for a checkpoint.
"""


def own_parts() -> dict[str, int]:
    """Return the process ids of GCS and raylet, if this process has started them; else nothing."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.name() in NAMES:
                found[NAMES[child.name()]] = child.pid
    return found


class RayHealth:
    """Waits for the end of GCS or of this machine's raylet."""

    def __init__(self, parts: Mapping[str, int], ports: Mapping[str, tuple[str, int]]) -> None:
        """Watch the processes ``parts`` by their ids, or the ``ports`` if there are no parts."""
        self._parts = parts
        self._ports = ports
        self.problem: str | None = None
        """A line on the process that has ended; None while all run."""

    @classmethod
    def of(cls, ray: ModuleType) -> "RayHealth":
        """Return the health of the connected cluster."""
        parts = own_parts()
        return cls(parts, {} if parts else _ports(ray))

    async def ended(self) -> str:
        """Return a line on the first process that ends."""
        waits = [_exits(name, pid) for name, pid in self._parts.items()]
        waits += [_refuses(name, *port) for name, port in self._ports.items()]
        self.problem = await _first(waits)
        return self.problem


def _ports(ray: ModuleType) -> dict[str, tuple[str, int]]:
    """Return where GCS and this machine's raylet of a joined cluster listen."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    found = {"GCS": (host.strip("[]"), int(port))}
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            found["raylet"] = (node["NodeManagerAddress"], node["NodeManagerPort"])
    return found


async def _first(waits: Sequence[Awaitable[str]]) -> str:
    """Return the first result; without waits, never."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(each: Awaitable[str]) -> None:
        said = await each
        if not ended.done():
            ended.set_result(said)

    with plainly():
        async with TaskGroup() as tasks:
            running = [tasks.create_task(wait(each)) for each in waits]
            try:
                return await ended
            finally:
                for task in running:
                    task.cancel()


async def _exits(name: str, pid: int) -> str:
    """Return once a process has ended."""
    loop, ended, line = asyncio.get_running_loop(), asyncio.Event(), f"Ray's {name} (process {pid}) has ended"
    try:
        number = os.pidfd_open(pid)
    except ProcessLookupError:
        return line
    except OSError:  # some containers do not allow or know the call
        while _is_running(pid):  # noqa: ASYNC110 (nothing reports the end)
            await asyncio.sleep(TRY_EVERY_S)
        return line
    try:
        loop.add_reader(number, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(number)
        os.close(number)
    return line


def _is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


async def _refuses(name: str, host: str, port: int) -> str:
    """Return once nothing has listened at a port of another program for UNREACHABLE_S seconds."""
    answered = loop_time()
    while (silent_s := loop_time() - answered) < UNREACHABLE_S:
        await asyncio.sleep(TRY_EVERY_S)
        began = loop_time()
        if await _connects(host, port):
            answered = began
    return f"Ray's {name} at {host}:{port} could not be reached for {silent_s:.0f} s"


async def _connects(host: str, port: int) -> bool:
    try:
        async with Deadline(TRY_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # a timeout is one
        return False
    writer.close()
    return True
