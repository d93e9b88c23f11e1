"""The actor of a server gives it the variables of the machine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from asyncrl.engines.cluster import actors
from asyncrl.engines.cluster.actors import ServerActor


def given(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of a server whose actor is asked to start it with ``environment``."""
    found: list[Mapping[str, str]] = []

    def note(name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, key: str) -> None:
        found.append(environment)

    name, (first, *_) = next(iter(psutil.net_if_addrs().items()))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(actors, "ServerProcess", note)
    monkeypatch.setattr(ServerActor, "address", lambda self: first.address)
    ServerActor().start("sglang-0", (), environment, Path("log"), "key")
    assert found[0].get("GLOO_SOCKET_IFNAME") in (name, environment.get("GLOO_SOCKET_IFNAME"))
    return found[0]


def test_a_server_gets_the_interface_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch, {"A": "1"}).keys() == {"A", "GLOO_SOCKET_IFNAME"}


def test_variables_of_the_launch_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(monkeypatch, {"GLOO_SOCKET_IFNAME": "of the launch"}) == {"GLOO_SOCKET_IFNAME": "of the launch"}
