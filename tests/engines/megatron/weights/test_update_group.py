"""The trainer's end of a weight update against SGLang's end."""

import gc
import json
import os
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from asyncrl.engines.megatron.weights import weight_sender
from asyncrl.engines.megatron.weights.update_group import JOIN_S, GroupStore, join_update_group
from asyncrl.engines.weight_sync.group_abort import UpdateGroups
from asyncrl.errors import WeightUpdateFailed
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.programs import ROOT, program

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
DEADLINE_S = 450
"""Limit for a process that imports SGLang, which takes 15 to 90 s on two shared cores."""


@pytest.mark.timeout(DEADLINE_S + 90)
def test_sglang_receives_the_weights_that_were_sent(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", tied=True)
    port = free_port()
    command = program("tests.engines.megatron.weights.engine_process", port, tmp_path / "received.safetensors")
    engine = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        settings = trainer_settings(checkpoint, update_weight_buffer_size=20_000, timeout_s=DEADLINE_S)
        with one_rank(settings) as rank:
            rank.train(random_batch())
            rank.save(tmp_path / "saved")
            assert engine.stdin is not None and engine.stdout is not None
            assert "joins\n" in engine.stdout, "the engine ended"
            rank.join_engines("127.0.0.1", port, 2, "weights", "gloo")
            buckets = rank.weight_buckets()
            engine.stdin.write(json.dumps([asdict(bucket) for bucket in buckets]) + "\n")
            engine.stdin.flush()
            rank.send(is_checked=False)
            assert engine.wait(timeout=DEADLINE_S) == 0
    finally:
        engine.kill()
        engine.communicate()
    saved, received = load_file(tmp_path / "saved" / "model.safetensors"), load_file(tmp_path / "received.safetensors")
    assert saved.keys() == received.keys()
    assert all((saved[name] == received[name]).all() for name in saved)


def test_a_group_has_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the setting when it creates the backend."""
    monkeypatch.setenv(BLOCKING_WAIT, "0")
    made_with = []

    def make(store: distributed_c10d.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        made_with.append(os.environ[BLOCKING_WAIT])
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("looking", make, devices=["cpu"])
    store = GroupStore("127.0.0.1", free_port())
    group = join_update_group(store, 1, "weights", "looking", 30.0)
    dist.destroy_process_group(group)
    assert made_with == ["1"]
    assert os.environ[BLOCKING_WAIT] == "0"


def test_engines_that_do_not_join_raise_weight_update_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.engines.megatron.weights.update_group.JOIN_S", 1.0)
    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank:
        with pytest.raises(ValueError, match="no engines have joined"):
            rank.send(is_checked=False)
        with pytest.raises(WeightUpdateFailed, match="cannot form update group weights of 2"):
            rank.join_engines("127.0.0.1", free_port(), 2, "weights", "gloo")


def test_joining_without_engines_ends_within_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.engines.megatron.weights.update_group.JOIN_S", 1.0)
    with one_rank(replace(trainer_settings(write_checkpoint(tmp_path / "hf")), timeout_s=60.0)) as rank:
        began = time.monotonic()
        with pytest.raises(WeightUpdateFailed, match="cannot form update group weights of 2"):
            rank.join_engines("127.0.0.1", free_port(), 2, "weights", "gloo")
        assert time.monotonic() - began < 20.0


class Group:
    """The place of a process group."""

    def __str__(self) -> str:
        return "a group"


def member(port: int, world_size: int, *, is_in_the_group: bool) -> subprocess.Popen[str]:
    """A process that comes as rank 1 of a group, and prints its error once nothing can become of that."""
    lines = [
        "from datetime import timedelta",
        "import torch.distributed as dist",
        "from torch.distributed import distributed_c10d as c10d",
        f"store = dist.TCPStore('127.0.0.1', {port}, {world_size}, False, timedelta(seconds=60))",
        "print('came', flush=True)",
        "try:",
        f"    dist.ProcessGroupGloo(c10d.PrefixStore('weights', store), 1, {world_size}, timedelta(seconds=60))"
        if is_in_the_group
        else "    store.wait(['never'], timedelta(seconds=60))",
        "except RuntimeError as error:",
        "    print(type(error).__name__, flush=True)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(("world_size", "is_in_the_group"), [(3, True), (2, False)])
def test_a_group_that_is_abandoned_while_it_forms_frees_all_its_members(
    world_size: int, is_in_the_group: bool, tmp_path: Path
) -> None:
    """A member does not come, or dies once it has come: neither the trainer nor another member waits for it."""
    port = free_port()
    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(rank.join_engines, "127.0.0.1", port, world_size, "weights", "gloo")
        engine = member(port, world_size, is_in_the_group=is_in_the_group)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "came\n"
        with pytest.raises(TimeoutError):
            joining.result(1.0)
        began = time.monotonic()
        rank.abandon("weights")
        with pytest.raises(WeightUpdateFailed, match=f"cannot form update group weights of {world_size} ranks"):
            joining.result(JOIN_S / 2)
        said, _ = engine.communicate(timeout=JOIN_S / 2)
        assert time.monotonic() - began < JOIN_S / 2
        assert said == "DistNetworkError\n"


def test_a_broadcast_that_failed_keeps_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo leaves a group with its last reference, and engines wait in it for as long."""

    def fails(sent: object, groups: UpdateGroups, *, is_checked: bool) -> None:
        raise RuntimeError(f"a member of {groups.main} is gone")

    monkeypatch.setattr(weight_sender, "_broadcast", fails)
    groups = UpdateGroups(main=Group())  # type: ignore[arg-type]  # never used
    group = weakref.ref(groups.main)
    gc.disable()
    try:
        sending = weight_sender._Sending([torch.ones(1)], groups, [groups.main], is_checked=False)  # noqa: SLF001
        assert sending.has_ended(20.0)
        assert str(sending.failure) == "a member of a group is gone"
        del sending, groups
        assert group() is None
    finally:
        gc.enable()


def test_a_store_that_closes_at_any_moment_frees_who_joins() -> None:
    """The driver gives a group up within a millisecond if the port of a dead engine is closed."""
    for number in range(10):
        store = GroupStore("127.0.0.1", free_port())
        with ThreadPoolExecutor(1) as threads:
            joining = threads.submit(join_update_group, store, 2, f"weights-{number}", "gloo", 600.0)
            time.sleep(number / 2_500)
            store.close()
            with pytest.raises(RuntimeError, match="the group was given up"):
                joining.result(JOIN_S / 2)


def test_a_group_may_be_abandoned_before_its_turn_comes(tmp_path: Path) -> None:
    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank:
        rank.abandon("weights-1")
        began = time.monotonic()
        with pytest.raises(WeightUpdateFailed, match="the group was given up"):
            rank.join_engines("127.0.0.1", free_port(), 2, "weights-1", "gloo")
        assert time.monotonic() - began < JOIN_S / 2
        rank.join_engines("127.0.0.1", free_port(), 1, "weights-2", "gloo")


def test_an_abandoned_group_ends_the_wait_for_groups_of_expert_parts(tmp_path: Path) -> None:
    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank, ThreadPoolExecutor(1) as threads:
        rank.join_engines("127.0.0.1", free_port(), 1, "weights", "gloo")
        joining = threads.submit(rank.join_parts, 2, 2, "weights-of-2-parts", "gloo")
        with pytest.raises(TimeoutError):
            joining.result(1.0)
        began = time.monotonic()
        rank.abandon("weights")
        with pytest.raises(WeightUpdateFailed, match="cannot form the groups weights-of-2-parts"):
            joining.result(JOIN_S / 2)
        assert time.monotonic() - began < JOIN_S / 2


def test_a_new_group_is_joined_only_after_the_old_broadcast_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.engines.megatron.weights.update_group.JOIN_S", 0.1)
    told, began, given_up, may_end = [], Event(), Event(), Event()

    def send(groups: object, *, is_checked: bool, by_part: bool) -> None:
        began.set()
        may_end.wait(20.0)
        told.append("sent")

    def give_up(groups: object) -> None:
        told.append("given up")
        given_up.set()

    with (
        one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"))) as rank,
        monkeypatch.context() as fakes,
        ThreadPoolExecutor(2) as threads,
    ):
        rank._update_groups = UpdateGroups(main="a group")  # type: ignore[arg-type]  # noqa: SLF001 (never used)
        fakes.setattr(rank._weight_sender, "send", send)  # noqa: SLF001
        fakes.setattr("asyncrl.engines.megatron.rank.abandon", give_up)
        fakes.setattr("torch.distributed.destroy_process_group", lambda group: told.append("left"))
        sending = threads.submit(rank.send, is_checked=False)
        assert began.wait(20.0)
        joining = threads.submit(rank.join_engines, "127.0.0.1", free_port(), 2, "weights", "gloo")
        assert given_up.wait(20.0)
        with pytest.raises(TimeoutError):
            joining.result(0.5)
        may_end.set()
        sending.result()
        with pytest.raises(WeightUpdateFailed, match="cannot form update group"):
            joining.result()
    assert told == ["given up", "sent", "left"]
