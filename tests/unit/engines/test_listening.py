"""Rendezvous stores of torch listen at one address, and gloo and NCCL stay on the loopback interface."""

import importlib
import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncrl.engines import listening
from asyncrl.engines.listening import bind_stores, gloo_variables, loopback_variables, url_of, without_proxy


def addresses(port: int) -> set[str]:
    """The addresses at which this process listens on ``port``."""
    return {
        each.laddr.ip.removeprefix("::ffff:")
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }


def test_a_store_listens_at_its_hosts_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    theirs = importlib.import_module("torch.distributed").TCPStore
    monkeypatch.setattr(rendezvous, "TCPStore", theirs)  # an earlier test may have bound it
    bind_stores()
    bound = rendezvous.TCPStore
    assert bound is not theirs
    bind_stores()
    assert rendezvous.TCPStore is bound
    asked = {"world_size": 1, "is_master": True, "timeout": timedelta(seconds=5), "multi_tenant": False}
    store = bound(host_name="127.0.0.1", port=0, **asked)
    assert addresses(store.port) == {"127.0.0.1"}
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_an_address_of_ipv6_is_in_brackets() -> None:
    assert url_of("10.0.0.1", 80) == "http://10.0.0.1:80"
    assert url_of("::1", 80) == "http://[::1]:80"


def test_hosts_are_asked_without_a_proxy_besides_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", ".example.org")
    found = without_proxy("10.0.0.1", "localhost")
    assert found == dict.fromkeys(("NO_PROXY", "no_proxy"), ".example.org,10.0.0.1,localhost")


def test_an_address_of_another_machine_is_left_to_torch() -> None:
    assert listening._listener("203.0.113.7", 0) is None  # noqa: SLF001


def test_only_a_run_on_one_machine_stays_on_the_loopback_interface() -> None:
    assert loopback_variables("10.0.0.1", {}) == {}
    given = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert loopback_variables("127.0.0.1", given) == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}
    assert set(loopback_variables("127.0.0.1")) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert loopback_variables("127.0.0.1", os.environ) == loopback_variables("127.0.0.1")


def test_gloo_listens_on_the_interface_of_the_machines_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {
        "lo": ["127.0.0.1", "10.0.0.9"],
        "eth0": ["192.0.2.7"],
        "eth1": ["10.0.0.7", "fd00::1"],
        "eth2": ["fe80::1%eth2"],
    }
    found = {
        name: [SimpleNamespace(address="00:00", family=socket.AF_PACKET)]
        + [SimpleNamespace(address=each, family=socket.AF_INET6 if ":" in each else socket.AF_INET) for each in known]
        for name, known in ends.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert gloo_variables("10.0.0.7", {}) == {"GLOO_SOCKET_IFNAME": "eth1"}
    assert gloo_variables("fe80::1", {}) == {"GLOO_SOCKET_IFNAME": "eth2"}
    assert gloo_variables("10.0.0.9", {}) == gloo_variables("fd00::1", {}) == {}  # gloo would take the first address
    assert gloo_variables("10.0.0.8", {}) == {}
    assert gloo_variables("10.0.0.7", {"GLOO_SOCKET_IFNAME": "eth0"}) == {}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert gloo_variables("10.0.0.7") == {}
