"""Weights from the real trainer to the real SGLang of two ranks with expert parallelism, on a CPU."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.launch import Flags, ServerLaunch, server_command
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.types import UpdateReport, Weights
from tests.engines.megatron.tiny import VOCAB, free_port, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.weights.test_fp8_served import KEY, START_S, Sender, a_port, until_it_answers

NUM_PARTS = 2
MOST = 1.1
"""The limit for the bytes that a rank receives, in relation to the bytes that it needs."""
TOKENS = tuple(token * 7 % VOCAB for token in range(24))
FLAGS: Flags = {"ep-size": str(NUM_PARTS), "skip-server-warmup": True, "skip-tokenizer-init": True}
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""Environment without which SGLang wants as many NUMA nodes as ranks."""


class MisplacingSender(Sender):
    """A trainer that takes the experts of the first part for those of the second, and the other way round."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        return tuple(
            bucket if bucket.expert_part is None else replace(bucket, expert_part=1 - bucket.expert_part)
            for bucket in await super().weight_buckets()
        )


@dataclass(kw_only=True)
class Run:
    """A trainer and a server with its client; the trainer's weights differ from update to update."""

    rank: MegatronRank
    control: EngineControl
    engine: SGLangEngine
    folder: Path
    version: int = 0

    def updater(self, sender: Sender, name: str, *, is_checked: bool) -> BroadcastUpdater:
        return BroadcastUpdater(
            EngineMembership((self.control,)),
            sender,
            master_address="127.0.0.1",
            find_port=a_port,
            backend="gloo",
            timeout_s=360.0,
            group_name=name,
            is_checked=is_checked,
        )

    async def update(self, updater: BroadcastUpdater) -> UpdateReport:
        self.version += 1
        self.rank.train(random_batch(step=self.version))
        await updater.snapshot()
        report = await updater.publish(Weights(version=self.version, step=self.version))
        await self.expect_new_weights()
        return report

    async def expect_new_weights(self) -> None:
        """Compare the server's log-probs with those of transformers under the trainer's weights."""
        found = torch.tensor(await self.engine.score(TOKENS, 1))
        self.rank.save(self.folder / f"saved-{self.version}")
        from transformers import Qwen3MoeForCausalLM  # takes 3 s, which every worker would spend in the collection

        network = Qwen3MoeForCausalLM.from_pretrained(self.folder / f"saved-{self.version}", dtype=torch.float32)
        with torch.no_grad():
            logprobs = network(torch.tensor([TOKENS])).logits.log_softmax(-1)[0, :-1]
        expected = logprobs.gather(1, torch.tensor(TOKENS)[1:, None])[:, 0]
        assert (found - expected).abs().max() < 1e-4


@contextmanager
def serving(path: Path, folder: Path) -> Iterator[tuple[ServerProcess, str]]:
    port, nccl_port = free_port(), free_port()
    launch = ServerLaunch(
        model_path=path,
        port=port,
        key=KEY,
        nccl_port=nccl_port,
        device="cpu",
        dtype="float32",
        seed=1,
        tensor_parallel=2,
        flags=FLAGS,
    )
    command = server_command(launch)
    server = ServerProcess("sglang", command.arguments, command.environment | CORES, folder / "sglang.log", command.key)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.stop()


async def experts_go_to_their_part(run: Run) -> None:
    updater = run.updater(Sender(run.rank), "planned", is_checked=False)
    await updater.connect()
    assert (await run.update(updater)).rank_bytes is None
    whole = (await run.update(updater)).rank_bytes
    assert whole is not None
    assert whole.received == sum(bucket.num_bytes for bucket in run.rank.weight_buckets())
    assert whole.received > 1.5 * whole.needed
    for is_checked in (False, True, False):
        updater._is_checked = is_checked  # noqa: SLF001 (a run does not change it)
        by_part = (await run.update(updater)).rank_bytes
        assert updater.is_by_part
        assert by_part is not None
        assert by_part.needed == whole.needed
        assert by_part.received <= MOST * by_part.needed


async def misplaced_experts_reach_all_ranks(run: Run) -> None:
    updater = run.updater(MisplacingSender(run.rank), "misplaced", is_checked=True)
    await updater.connect()
    for _ in range(3):
        report = await run.update(updater)
        assert not updater.is_by_part
    assert report.rank_bytes is not None
    assert report.rank_bytes.received == report.num_bytes


@pytest.mark.timeout(START_S + 900)
def test_each_rank_receives_the_experts_that_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_checkpoint(
        tmp_path / "hf", moe=True, hidden_size=64, intermediate_size=128, moe_intermediate_size=128, num_experts=8
    )
    settings = trainer_settings(path, update_weight_buffer_size=200_000, num_expert_parts=NUM_PARTS)

    async def whole_run(server: ServerProcess, url: str, rank: MegatronRank) -> None:
        async with HttpClient(KEY) as http:
            await until_it_answers(http, server, url)
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=360.0)
            run = Run(
                rank=rank,
                control=EngineControl(http, url, timeout_s=360.0, num_ranks=2),
                engine=engine,
                folder=tmp_path,
            )
            await experts_go_to_their_part(run)
            with caplog.at_level(logging.WARNING):
                await misplaced_experts_reach_all_ranks(run)

    with serving(path, tmp_path) as (server, url), one_rank(settings) as rank:
        asyncio.run(whole_run(server, url, rank))
        log = server.log_path.read_text(errors="replace")
    (warning,) = [each.getMessage() for each in caplog.records if "to every engine rank" in each.getMessage()]
    assert "holds weights of the bucket of model.layers.0.mlp.experts." in warning
    assert "is no mere copy" not in log
