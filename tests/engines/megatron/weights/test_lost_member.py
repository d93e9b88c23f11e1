"""A member of an update group dies during a broadcast: the others survive, and form another group at once."""

import json
import os
import signal
import subprocess
import time
from datetime import timedelta

import pytest
from torch.distributed.rendezvous import rendezvous

from asyncrl.engines.sglang.labels import RECORDED
from asyncrl.engines.sglang.plugin.direct import around_join
from asyncrl.engines.weight_sync.group_abort import without_watchdog
from tests.engines.megatron.tiny import free_port
from tests.forks import Fork

DEADLINE_S = 540
WATCHDOG = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}
"""Torch's watchdog ends its process four times this long after a failure; by default after a minute."""
OVER_A_NETWORK = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.timeout(DEADLINE_S + 90)
@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=pytest.mark.gpu)])
def test_an_update_group_outlives_the_death_of_a_member(device: str, backend: str) -> None:
    """NCCL takes members that share one GPU for three machines, and communicates over a network."""
    ports = [str(free_port()), str(free_port())]
    members = [
        Fork(
            "tests.engines.megatron.weights.lost_member",
            rank,
            device,
            backend,
            *ports,
            env=WATCHDOG | OVER_A_NETWORK | {"NCCL_HOSTID": f"machine-{rank}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    try:
        engine, dead, trainer = [
            (*member.communicate(timeout=DEADLINE_S), member.returncode) for member in reversed(members)
        ]
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert dead[2] == -signal.SIGKILL
    first, second, left_in_s, third = json.loads(trainer[0])
    assert first == third == [True, "None"]
    assert second[0]
    assert second[1] != "None"
    assert left_in_s < 20.0
    (*first, second, third, values, joined_in_s) = json.loads(engine[0])
    assert first == [[True, RECORDED]]
    assert second[0] is (device == "cpu")  # with gloo nothing went through the one that died
    assert third == [True, RECORDED]
    assert values == [2]
    assert joined_in_s < 30.0


def test_without_watchdog_affects_only_groups_made_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the setting when it creates a group."""
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    with without_watchdog():
        assert os.environ[BLOCKING_WAIT] == "1"
    assert os.environ[BLOCKING_WAIT] == "0"
    monkeypatch.setenv(BLOCKING_WAIT, "true")
    with pytest.raises(RuntimeError), without_watchdog():
        raise RuntimeError
    assert os.environ[BLOCKING_WAIT] == "true"


def test_a_server_does_not_wait_for_a_group_that_was_given_up() -> None:

    def join(*args: object) -> tuple[bool, str]:
        raise AssertionError("torch would wait for half an hour")

    began = time.monotonic()
    is_joined, said = around_join(join, "updater", "127.0.0.1", free_port(), 1, 2, "weights")
    assert time.monotonic() - began < 10.0
    assert not is_joined
    assert "the trainer serves no store for the group at 127.0.0.1:" in said


def test_a_server_does_not_connect_for_ever_to_a_store_that_has_just_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port was open a moment before."""
    monkeypatch.setattr("asyncrl.engines.sglang.plugin.direct.wait_until_served", lambda *where: None)
    monkeypatch.setattr("asyncrl.engines.sglang.plugin.direct.CONNECT_S", 1.0)

    def join(updater: str, address: str, port: int, rank: int, size: int, name: str, backend: str) -> tuple[bool, str]:
        with pytest.raises(RuntimeError):
            next(rendezvous(f"tcp://{address}:{port}", rank, size, timeout=timedelta(minutes=30)))
        return False, "not joined"

    began = time.monotonic()
    assert around_join(join, "updater", "127.0.0.1", free_port(), 1, 2, "weights") == (False, "not joined")
    assert time.monotonic() - began < 20.0


def test_servers_join_update_groups_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BLOCKING_WAIT, "0")
    monkeypatch.setattr("asyncrl.engines.sglang.plugin.direct.wait_until_served", lambda *where: None)
    made_with: list[object] = []

    def join(*args: object, **kwargs: object) -> tuple[bool, str]:
        made_with.extend((args, kwargs, os.environ[BLOCKING_WAIT]))
        return True, "joined"

    assert around_join(join, "updater", "127.0.0.1", 1, 1, 2, "weights") == (True, "joined")
    assert made_with == [("updater", "127.0.0.1", 1, 1, 2, "weights", "nccl"), {}, "1"]
