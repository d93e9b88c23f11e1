"""Rank 1 of two: training steps in which this rank runs out of memory.

    python -m tests.engines.megatron.train.memory_process TASK

The last line of the output is JSON: the result of ``trained`` for each case.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.rank import MegatronRank

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.errors import AsyncRLError
from tests.engines.megatron.tiny import random_batch, trainer_settings

TEXT = "CUDA out of memory. Tried to allocate 20.00 GiB."


class Shortage:
    """Memory that runs out in a real rank: in the forward or backward pass of a microbatch of the policy."""

    def __init__(self, rank: MegatronRank, place: str | None = None, first: int = 0, times: int = 1) -> None:
        """Microbatch ``first`` fails, counted from 0, and ``times`` - 1 further ones behind it."""
        self._decoder = rank._model.decoder  # noqa: SLF001
        self._place = place
        self._left = range(first, first + times)
        self._number = -1
        self.was_met = False

    def __enter__(self) -> Self:
        self._hook = self._decoder.register_forward_hook(self._passed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()

    def _passed(self, decoder: Any, arguments: Any, output: Any) -> None:
        self._number += 1
        if self._number not in self._left:
            return
        if self._place == "forward":
            self._raise()
        if self._place == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: self._raise())

    def _raise(self) -> None:
        self.was_met = True
        raise torch.OutOfMemoryError(TEXT)


def trained(rank: int, checkpoint: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Train three steps on two ranks; rank 1 runs out of memory in the second as the case says."""
    settings = trainer_settings(
        checkpoint, max_tokens_per_gpu=24, num_steps_per_rollout=1, use_rollout_logprobs=True, timeout_s=60.0
    )
    settings = replace(settings, parallel=ParallelConfig(**case["parallel"]))
    trainer = MegatronRank(settings, rank, 2, "127.0.0.1", case["port"])
    error, repeated = None, 0.0
    try:
        trainer.train(random_batch())
        with Shortage(trainer, place=case["place"] if rank == 1 else None, first=case["first"]):
            repeated = trainer.train(random_batch(seed=1, step=1)).metrics.get("train/repeated_passes", 0.0)
        trainer.train(random_batch(seed=2, step=2))
    except AsyncRLError as failed:
        error = str(failed)
    sums = [float(parameter.detach().double().square().sum()) for parameter in trainer._model.parameters()]  # noqa: SLF001
    trainer.close()
    return {"error": error, "repeated": repeated, "weights": sums}


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = json.loads(sys.argv[1])
    print(json.dumps([trained(1, Path(task["checkpoint"]), case) for case in task["cases"]]))  # noqa: T201
