"""The choice of ports for servers that bind them seconds later."""

import socket
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.engines.cluster import actors
from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.errors import ServerFailed
from tests.ports import free_ports

CHOOSE = """
import sys
from asyncrl.engines.cluster import actors
actors.PORTS = [*map(int, sys.argv[1:])]
print(*actors.NetworkPlace().free_ports(4), flush=True)
input()
"""
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_ports_in_use_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server, socket.socket() as other:
        other.bind(("", 0))
        taken, free = server.getsockname()[1], other.getsockname()[1]
        other.close()
        monkeypatch.setattr(actors, "PORTS", [taken, free])
        assert NetworkPlace().free_ports(1) == (free,)
        with pytest.raises(ServerFailed, match=f"2 free ports are needed, and {taken} to {free} have 1"):
            NetworkPlace().free_ports(2)


def test_ports_of_ray_workers_are_not_chosen() -> None:
    from ray.scripts.scripts import start

    of_ray = {option.name: option.default for option in start.params}
    assert actors.PORTS[0] > int(of_ray["max_worker_port"])
    assert actors.PORTS[-1] < 32_768  # the kernel's first, for outgoing connections


def test_ray_can_be_started_without_its_autoscaler() -> None:
    """The launch script's flag is hidden in Ray; the autoscaler's metrics would listen on every interface."""
    from ray.scripts.scripts import start

    assert "--no-monitor" in {name for option in start.params for name in option.opts}


def test_a_port_is_chosen_once_while_the_process_lives_that_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "PORTS", range(5_000, 9_000))  # no other process of the tests chooses among these
    few = NetworkPlace().free_ports(8)
    NetworkPlace().free_ports(0)
    monkeypatch.setattr(actors, "PORTS", few)
    with subprocess.Popen((sys.executable, "-c", CHOOSE, *map(str, few)), **PIPES) as process:
        assert process.stdout is not None
        theirs = {int(port) for port in process.stdout.readline().split()}
        assert len(theirs) == 4
        for _ in range(3):  # more ports than there are: those of an earlier call are free again
            assert set(NetworkPlace().free_ports(3)) <= set(few) - theirs
        with pytest.raises(ServerFailed):
            NetworkPlace().free_ports(5)
        process.communicate(b"\n")
    assert set(NetworkPlace().free_ports(8)) == set(few)


def test_ports_of_tests_stay_reserved_after_later_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay of routes chooses the ports of forty cases at once; another process listened on one of them."""
    chosen = [port for _ in range(3) for port in free_ports(2)]
    NetworkPlace().free_ports(0)
    assert len(set(chosen)) == 6
    monkeypatch.setattr(actors, "PORTS", chosen)
    with pytest.raises(ServerFailed, match="have 0"):
        free_ports(1)
