"""One of two tensor-parallel ranks that check their fast operations: right ones, and wrong ones on rank 1 alone.

    python -m tests.engines.megatron.fast_step.fast_step_process RANK PORT CHECKPOINT

The last line of the output is JSON: the lines of the check, or its error, by case.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.rank import MegatronRank

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.fast_step.check import check_fast_step, operations_in_use
from asyncrl.engines.megatron.fast_step.sizes import sizes_of
from asyncrl.errors import FastStepWrong
from tests.engines.megatron.fast_step.wrong_operations import fails, less_entropy_in_a_group, not_a_number
from tests.engines.megatron.tiny import trainer_settings

CASES: dict[str, dict[str, Any]] = {
    "right": {},
    "fails": {"head": fails},
    "not a number": {"head": not_a_number},
    "wrong in a group": {"head": less_entropy_in_a_group},
    "right again": {},
}
"""The operations that rank 1 replaces."""


def run(rank: int, port: int, checkpoint: Path) -> dict[str, Any]:
    """Return the outcome of each case on this rank."""
    settings = replace(trainer_settings(checkpoint), parallel=ParallelConfig(tensor_model_parallel_size=2))
    trainer = MegatronRank(settings, rank, 2, "127.0.0.1", port)
    sizes = sizes_of(trainer._model, trainer._shape, settings, torch.device("cpu"))  # noqa: SLF001
    operations = operations_in_use(sizes, trainer._optimizer)  # noqa: SLF001
    found: dict[str, Any] = {"trainer": trainer.check_fast_step()}
    for name, wrong in CASES.items():
        try:
            found[name] = check_fast_step(sizes, replace(operations, **(wrong if rank == 1 else {})))
        except FastStepWrong as error:
            found[name] = str(error)
    trainer.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))  # noqa: T201
