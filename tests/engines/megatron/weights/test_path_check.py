"""The trainer meets an engine, notices that its path is cut, and is free to meet it again."""

import json
import subprocess

import pytest
import torch.distributed as dist

from asyncrl.engines.weight_sync.path_check import MET, meet
from tests.engines.megatron.tiny import free_port
from tests.engines.megatron.weights.test_lost_member import OVER_A_NETWORK
from tests.engines.sglang.plugin.direct_process import hash_store
from tests.forks import Fork

DEADLINE_S = 510


class Alone:
    """A group of two ranks, of which the other one does not come."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_no_member_enters_a_collective_before_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forming of an NCCL communicator would never end."""

    def all_reduce(*args: object, **kwargs: object) -> None:
        pytest.fail("the other rank is missing")

    store = hash_store()
    monkeypatch.setattr("asyncrl.engines.weight_sync.group_abort.store_of", lambda group: store)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(RuntimeError):
        meet(Alone(), "cpu", 0.2)


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), pytest.param("cuda:0", "nccl", marks=pytest.mark.gpu)]
)
def test_an_engine_that_joins_and_never_sends_is_not_met_and_the_trainer_is_free(device: str, backend: str) -> None:
    """NCCL takes members that share one GPU for two machines, and communicates over a network."""
    ports = [str(free_port()) for _ in range(3)]
    members = [
        Fork(
            "tests.engines.megatron.weights.meeting_member",
            role,
            device,
            backend,
            *ports,
            env=OVER_A_NETWORK | {"NCCL_HOSTID": f"machine-{role}"},
            stdout=subprocess.PIPE,
        )
        for role in ("trainer", "engine")
    ]
    try:
        trainer, engine = [json.loads(member.communicate(timeout=DEADLINE_S)[0]) for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    (first, _), (second, second_s), (third, _) = trainer
    assert first == third == ""
    assert second.startswith("did not meet the engine")
    assert second_s < (10.0 if device == "cpu" else 60.0)
    assert engine == [[True, MET], [True, ""], [True, MET]]
