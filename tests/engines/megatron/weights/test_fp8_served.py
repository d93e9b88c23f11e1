"""fp8 weights from the real trainer to the real SGLang, which on a CPU loads and checks them, but cannot compute."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.launch import ServerLaunch, server_command
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.disk import DiskUpdater
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.errors import EngineError
from asyncrl.protocols import WeightUpdater
from asyncrl.types import Weights
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.weights.fp8_checkpoints import IN_FULL, in_fp8

KEY = "key-of-tests"
START_S = 900.0
"""Limit for the start: SGLang imports for 40 s on two idle cores, and for minutes on busy ones."""
WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
}
"""Sizes that are multiples of a block: SGLang joins matrices, and their scales, at whole blocks only."""
FLAGS = {"skip-server-warmup": True, "skip-tokenizer-init": True}
"""Flags without which the server would compute to warm up, and look for a tokenizer that the checkpoint lacks."""


class Sender:
    """``WeightSender`` and ``WeightWriter`` over a rank in this process."""

    def __init__(self, rank: MegatronRank) -> None:
        self._rank = rank

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        return self._rank.weight_buckets()

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        await asyncio.to_thread(self._rank.open_group, master_address, master_port, group_name)

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        group = master_address, master_port, world_size, group_name, backend
        await asyncio.to_thread(self._rank.join_engines, *group)

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        await asyncio.to_thread(self._rank.join_parts, num_parts, world_size, group_name, backend)

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        raise AssertionError("no engine is restarted here")

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        return self._rank.snapshot(is_checked, by_part)

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        return self._rank.resend(is_checked, by_part)

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        self._rank.send(is_checked, by_part)

    async def abandon(self, group_name: str) -> None:
        self._rank.abandon(group_name)

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        self._rank.write_weights(folder)


async def a_port() -> int:
    return free_port()


async def until_it_answers(http: HttpClient, server: ServerProcess, url: str) -> None:
    """Wait until the server answers a request that computes nothing; ``/health`` would compute."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        server.raise_if_dead()
        try:
            await http.look(f"{url}/get_model_info", 2.0)
        except EngineError:
            await asyncio.sleep(0.5)
        else:
            return
    raise AssertionError(server.tail())


async def update_both_ways(server: ServerProcess, url: str, rank: MegatronRank, folder: Path) -> None:
    async with HttpClient(KEY) as http:
        await until_it_answers(http, server, url)
        control = EngineControl(http, url, timeout_s=180.0)
        broadcast = BroadcastUpdater(
            EngineMembership((control,)),
            Sender(rank),
            master_address="127.0.0.1",
            find_port=a_port,
            backend="gloo",
            timeout_s=180.0,
            is_checked=True,
        )
        disk = DiskUpdater(EngineMembership((control,)), Sender(rank), folder=folder, timeout_s=180.0)
        await broadcast.connect()
        await disk.connect()
        updaters: tuple[WeightUpdater, ...] = broadcast, broadcast, disk, broadcast
        for version, updater in enumerate(updaters, 1):
            rank.train(random_batch(step=version))
            await updater.snapshot()
            await updater.publish(Weights(version=version, step=version))
        assert broadcast.is_direct


@pytest.mark.timeout(START_S + 360)
def test_fp8_updates_stay_direct_copies_even_after_an_update_by_disk(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "hf", moe=True, moe_intermediate_size=128, dtype="bfloat16", **WHOLE_BLOCKS)
    in_fp8(path, block=(128, 128), in_full=IN_FULL)
    port, nccl_port = free_port(), free_port()
    launch = ServerLaunch(
        model_path=path, port=port, key=KEY, nccl_port=nccl_port, device="cpu", dtype="bfloat16", seed=1, flags=FLAGS
    )
    command = server_command(launch)
    server = ServerProcess("sglang", command.arguments, command.environment, tmp_path / "sglang.log", command.key)
    try:
        with one_rank(trainer_settings(path, dtype="bfloat16", update_weight_buffer_size=300_000)) as rank:
            assert len(rank.weight_buckets()) > 1
            assert any(torch.float8_e4m3fn == getattr(torch, name) for name in rank.weight_buckets()[0].dtypes)
            asyncio.run(update_both_ways(server, f"http://127.0.0.1:{port}", rank, tmp_path / "disk"))
    finally:
        server.stop()
    log = server.log_path.read_text(errors="replace")
    assert "is no mere copy" not in log
    assert "have moved" not in log
