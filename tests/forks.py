"""Modules of the tests as processes that are forks of one process, which has imported torch and Megatron.

    this process ──module, arguments, standard streams──▶ fork server ──fork──▶ the module, as ``__main__``
                 ◀──────────────exit status──────────────

A fork takes milliseconds, and these imports 3 to 6 s of CPU time.  Everything else is as with ``subprocess.Popen``.
"""

import gc
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from tests.programs import ROOT, program

_MOST_BYTES = 1 << 20
_FAILED = 255
_servers: list[subprocess.Popen[bytes]] = []
"""Kept, because the end of such an object without that of its process is a warning."""


class Fork(subprocess.Popen[str]):
    """A module that runs as ``__main__`` in ``ROOT`` with ``arguments``."""

    def __init__(self, module: str, *arguments: object, env: Mapping[str, str] | None = None, **pipes: Any) -> None:
        """``env`` has changes of the environment for what the module does, not for the imports of the server."""
        self._request = {"argv": [module, *map(str, arguments)], "env": dict(env or {})}
        self._status = -1
        """The end of a pipe from which the exit status is read."""
        super().__init__([module], text=True, **pipes)

    def _execute_child(self, *given: Any) -> None:
        """Ask the server, in the place of a fork and an exec."""
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = given[10:16]
        self._status, status_end = os.pipe()
        streams = [own if end == -1 else end for end, own in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        channel = _server()
        socket.send_fds(channel, [json.dumps(self._request).encode()], [*streams, status_end])
        os.close(status_end)
        self.pid = int(channel.recv(64))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0.0)[0]:
            self._take_status()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take_status()
        return self.returncode

    def _take_status(self) -> None:
        self.returncode = int(os.read(self._status, 64) or _FAILED)
        os.close(self._status)


@cache
def _server() -> socket.socket:
    """Start the server of this process.  It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        _servers.append(subprocess.Popen(program("tests.forks", theirs.fileno()), cwd=ROOT, pass_fds=[theirs.fileno()]))
    return ours


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return it in the fork, and None in the server when the other side has gone."""
    running: dict[int, tuple[int, int]] = {}
    while True:
        ends_and_requests: list[socket.socket | int] = [channel, *running]
        for ready in select.select(ends_and_requests, [], [])[0]:
            if ready in running:
                pid, status = running.pop(ready)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                os.close(ready)
                continue
            data, ends, _, _ = socket.recv_fds(channel, _MOST_BYTES, 4)
            if not data:
                return None
            if not (pid := os.fork()):
                _become(ends[:3], [channel.detach(), ends[3], *running, *(status for _, status in running.values())])
                asked: dict[str, Any] = json.loads(data)
                return asked
            running[os.pidfd_open(pid)] = pid, ends[3]
            for end in ends[:3]:
                os.close(end)
            channel.send(str(pid).encode())


def _become(streams: list[int], others: list[int]) -> None:
    """Use the standard streams of the request, and close all other descriptors of the server."""
    for number, end in enumerate(streams):
        os.dup2(end, number)
    for end in (*streams, *others):
        os.close(end)


def _main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    megatron_imports = import_module("tests.megatron_imports").megatron_imports
    with megatron_imports():
        for name in ("asyncrl.engines.megatron.rank", "tests.engines.megatron.tiny"):
            import_module(name)
    import_module("asyncrl.engines.sglang.plugin.direct")
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only one of the threads"
    gc.collect()
    gc.freeze()  # forks leave what was imported in the memory that they share
    if asked := _serve(channel):
        os.environ.update(asked["env"])
        sys.argv = asked["argv"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
