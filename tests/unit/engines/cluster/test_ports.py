"""The choice of ports for servers that bind them seconds later."""

import socket

import pytest

from asyncrl.engines.cluster import actors
from asyncrl.engines.cluster.actors import NetworkPlace


def test_ports_in_use_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = NetworkPlace().free_ports(2)
    monkeypatch.setattr(actors, "PORTS", [taken, free])
    with socket.create_server(("", taken)):
        assert NetworkPlace().free_ports(2) == (free,)
    assert set(NetworkPlace().free_ports(2)) == {taken, free}


def test_ports_of_ray_workers_are_not_chosen() -> None:
    from ray.scripts.scripts import start

    of_ray = {option.name: option.default for option in start.params}
    assert actors.PORTS[0] > int(of_ray["max_worker_port"])
    assert actors.PORTS[-1] < 32_768  # the kernel's first, for outgoing connections


def test_concurrent_callers_get_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    few = NetworkPlace().free_ports(12)
    monkeypatch.setattr(actors, "PORTS", few)
    found = [NetworkPlace().free_ports(4, share, 3) for share in range(3)]
    assert sorted(port for ports in found for port in ports) == sorted(few)
