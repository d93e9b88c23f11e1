"""One of two ranks that write three checkpoints, of which the first one fails on rank 0.

python -m tests.engines.megatron.checkpoint.two_ranks_process FAULT RANK PORT CHECKPOINT ROOT

The last line of the output is JSON: the error of each save, or null, and the loss of each step.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.rank import MegatronRank

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.checkpoint import saver
from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.errors import CheckpointFailed
from tests.engines.megatron.tiny import random_batch, trainer_settings
from tests.save_targets import target as target_of

LIMIT_S = 8.0
"""Limit of a save: enough for one that is not stalled, on a busy machine."""


def stall() -> Event:
    """Stall the next write of this process until the event."""
    wakes, write = Event(), saver._write_file  # noqa: SLF001

    def stalled(*given: Any) -> Any:
        saver._write_file = write  # noqa: SLF001
        wakes.wait()
        return write(*given)

    saver._write_file = stalled  # type: ignore[assignment]  # noqa: SLF001
    return wakes


def refuse_memory() -> None:
    """Let the next allocation of host memory for a checkpoint fail."""
    taken = CheckpointMemory._taken  # noqa: SLF001

    def refused(*_: Any) -> Any:
        CheckpointMemory._taken = taken  # type: ignore[method-assign]  # noqa: SLF001
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    CheckpointMemory._taken = refused  # type: ignore[assignment]  # noqa: SLF001


def save(rank: MegatronRank, root: Path, step: int) -> str | None:
    """Write a checkpoint, and return the error of this rank."""
    box = [target_of(root, step) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    try:
        rank.begin_checkpoint(box[0], {}, with_optimizer=True)
        rank.finish_checkpoint()
    except CheckpointFailed as error:
        return str(error)
    return None


def run(fault: str, number: int, port: int, checkpoint: Path, root: Path) -> dict[str, Any]:
    """Train and save three times."""
    settings = trainer_settings(checkpoint, timeout_s=20.0, save_timeout_s=LIMIT_S)
    settings = replace(settings, parallel=ParallelConfig(use_distributed_optimizer=True))
    rank, wakes = MegatronRank(settings, number, 2, "127.0.0.1", port), Event()
    errors, losses = [], []
    for step in range(3):
        losses.append(rank.train(random_batch(seed=step, step=step)).loss)
        if step == 0 and number == 0:
            if fault == "stall":
                wakes = stall()
            else:
                refuse_memory()
        errors.append(save(rank, root, step + 1))
        if step == 1:
            wakes.set()
    return {"errors": errors, "losses": losses}


if __name__ == "__main__":
    torch.set_num_threads(1)
    fault, number, port, *paths = sys.argv[1:]
    print(json.dumps(run(fault, int(number), int(port), *map(Path, paths))), flush=True)  # noqa: T201
