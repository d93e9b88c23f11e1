"""One of four ranks, whose first pipeline stage has dense layers alone: a save, two steps, and both again after a load.

python -m tests.engines.megatron.checkpoint.dense_stage_process RANK PORT NEXT_PORT CHECKPOINT ROOT

The last line of the output is JSON: the numbers of the steps before and after the load.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.rank import MegatronRank

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.checkpoint.directory import Origin, folder_of
from tests.engines.megatron.tiny import random_batch, trainer_settings
from tests.save_targets import target as target_of


def steps(rank: MegatronRank) -> list[Any]:
    """Train two steps after the first one, and return their numbers."""
    reports = [rank.train(random_batch(seed=step, step=step)) for step in (1, 2)]
    return [[report.loss, report.grad_norm, list(map(list, report.logprobs))] for report in reports]


def run(number: int, ports: tuple[int, int], checkpoint: Path, root: Path) -> list[Any]:
    """Return the numbers of the steps that follow the save, and of the same steps after the load."""
    settings = trainer_settings(checkpoint, use_rollout_logprobs=True, timeout_s=120.0)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
        decoder_first_pipeline_num_layers=1,
        use_distributed_optimizer=True,
    )
    settings = replace(settings, parallel=parallel)
    rank = MegatronRank(settings, number, 4, "127.0.0.1", ports[0])
    rank.train(random_batch())
    box = [target_of(root, 1) if number == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    rank.begin_checkpoint(box[0], {}, with_optimizer=True)
    rank.finish_checkpoint()
    before = steps(rank)
    rank.close()
    rank = MegatronRank(settings, number, 4, "127.0.0.1", ports[1])
    rank.load(Origin(folder=folder_of(root, 1), kind="resume", optimizer=True))
    after = steps(rank)
    rank.close()
    return [before, after]


if __name__ == "__main__":
    torch.set_num_threads(1)
    first, port, next_port, *paths = sys.argv[1:]
    print(json.dumps(run(int(first), (int(port), int(next_port)), *map(Path, paths))), flush=True)  # noqa: T201
