"""Two machines for ``benchmarks.lost_engine --kill machine``: this one and a network namespace, with a Ray node each.

    this machine, 10.213.0.1 ──── veth ──── the namespace, 10.213.0.2
    driver, trainer, engines                one engine

The other machine vanishes when its end of the link goes down: no packet arrives any more, and nothing is closed.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.common.circumstances import ROOT

NETWORK = "10.213.0."
"""The first three numbers of both addresses."""
_SPACE, _HERE, _THERE = "asyncrl-machine", "asyncrl-here", "asyncrl-there"
"""Names of the namespace, and of both ends of the link."""
_STARTED = "Ray runtime started"
"""Text that ``ray start`` writes once the node runs."""
_READY_S, _END_S = 90.0, 20.0
"""Seconds for a Ray node to start, and to end."""


class TwoMachines:
    """Two Ray nodes; ``with`` starts and ends them.  Needs root, and the program ``ip``."""

    def __init__(self, num_here: int) -> None:
        """Offer ``num_here`` CPUs of this machine, and one of the other, to trainer ranks and engines."""
        self._num_here = num_here
        self._nodes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._head = f"{NETWORK}1:{free.getsockname()[1]}"
        unattended = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_worker_niceness": "0"}
        self.environment = {**unattended, "RAY_ADDRESS": self._head}
        """Variables with which a run joins both machines."""

    def __enter__(self) -> "TwoMachines":
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise SystemExit("error: --kill machine makes a network namespace: it needs root, and the program ip")
        _ip(f"netns add {_SPACE}")  # fails if there is one, which is another benchmark's
        with contextlib.ExitStack() as undoing:
            undoing.callback(self.__exit__)
            self._begin()
            undoing.pop_all()
        return self

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="two", dir="/tmp"))  # a longer one is too long for Ray's sockets
        for words in (
            f"link add {_HERE} type veth peer name {_THERE} netns {_SPACE}",
            f"addr add {NETWORK}1/30 dev {_HERE}",
            f"link set {_HERE} up",
            f"-n {_SPACE} addr add {NETWORK}2/30 dev {_THERE}",
            f"-n {_SPACE} link set lo up",
            f"-n {_SPACE} link set {_THERE} up",
        ):
            _ip(words)
        port = self._head.rpartition(":")[2]
        head = ("--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(self._folder))
        self._start("here", (), (*head, "--node-ip-address", f"{NETWORK}1", "--num-cpus", str(self._num_here)))
        self._join()

    def __exit__(self, *_: object) -> None:
        for node in reversed(self._nodes):
            with contextlib.suppress(psutil.NoSuchProcess):
                _end(psutil.Process(node.pid))
        self._end_other()
        for left in self.processes(str(self._folder)):
            _kill(left)
        for words in (f"link delete {_HERE}", f"netns delete {_SPACE}"):
            subprocess.run(["ip", *words.split()], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def processes(self, text: str) -> list[psutil.Process]:
        """Return the processes whose command lines contain ``text`` and an address of these machines."""
        lines = {each: " ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
        return [each for each, line in lines.items() if text in line and NETWORK in line]

    def vanish(self) -> None:
        """Take the other machine from the network."""
        _ip(f"-n {_SPACE} link set {_THERE} down")

    def come_back(self) -> None:
        """Start the other machine again: its former processes are gone, and it has another Ray node."""
        self._end_other()
        _ip(f"-n {_SPACE} link set {_THERE} up")
        self._join()

    def _join(self) -> None:
        within = ("ip", "netns", "exec", _SPACE)
        joined = ("--address", self._head, "--node-ip-address", f"{NETWORK}2", "--num-cpus", "1")
        self._start(f"there-{len(self._nodes)}", within, joined)

    def _start(self, name: str, within: Sequence[str], words: Sequence[str]) -> None:
        """Start a Ray node.  Raises SystemExit."""
        log = self._folder / f"{name}.log"
        ray = Path(sys.executable).with_name("ray")
        with log.open("wb") as output:
            node = subprocess.Popen(
                [*within, ray, "start", "--block", "--disable-usage-stats", *words],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._nodes.append(node)
        deadline = time.monotonic() + _READY_S
        while _STARTED not in (said := log.read_text()):
            if node.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"error: Ray did not start: {said[-1000:]}")
            time.sleep(0.2)

    def _end_other(self) -> None:
        found = subprocess.run(["ip", "netns", "pids", _SPACE], capture_output=True, text=True, check=False).stdout
        for number in map(int, found.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(number).kill()


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _end(node: psutil.Process) -> None:
    """End a Ray node and all that it started.  Raises NoSuchProcess."""
    processes = [*node.children(recursive=True), node]
    node.terminate()
    psutil.wait_procs([node], timeout=_END_S)
    for process in processes:
        _kill(process)
