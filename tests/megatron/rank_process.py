"""One rank of a trainer in several layouts, one after the other: two good steps and a poisoned one, then a save.

    rank_process.py RANK WORLD_SIZE CASES

As a process of its own it prints what ``run`` returns for each case as its last line, in JSON.
"""

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from asyncrl.engines.megatron.rank import MegatronRank

from tiny import poisoned, random_batch, trainer_settings

from asyncrl.config.parallel import ParallelConfig
from asyncrl.engines.megatron.sharding import all_weights, local_weights, whole_weights
from asyncrl.engines.megatron.weights import splits_of
from asyncrl.errors import NonFiniteLoss

CPU = torch.device("cpu")


def case(checkpoint: Path, target: Path, port: int, **parallel: Any) -> dict[str, Any]:
    """What ``run`` is to do; ``parallel`` are fields of ParallelConfig."""
    return {"checkpoint": str(checkpoint), "target": str(target), "port": port, "parallel": parallel}


def run(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    """Losses and further numbers, log-probs of the first step, and whether the poisoned step was refused.

    ``target`` gets the weights in the end, in Hugging Face format, and, unless each rank has the sum of a part of the
    gradients only, ``target/gradients.pt`` those of the last update.
    """
    # 6 samples in the first update and 3 in the second, in small microbatches: unequal shares, some of them empty
    changes = {"use_rollout_logprobs": True, "num_steps_per_rollout": 2, "lr": 1e-4, "timeout_s": 120.0}
    changes |= {"max_tokens_per_gpu": 8, "balance_data": world_size > 1}
    # a critic, a reference model, and the mean advantage over all ranks' tokens
    changes |= {"advantage_estimator": "ppo", "kl_coef": 0.1, "normalize_advantages": True}
    settings = trainer_settings(Path(case["checkpoint"]), **changes)
    settings = replace(settings, parallel=ParallelConfig(**case["parallel"]))
    trainer = MegatronRank(settings, rank, world_size, "127.0.0.1", case["port"])
    batch = random_batch(groups=3, group_size=3)
    reports = [trainer.train(batch) for _ in range(2)]
    gradients = {} if settings.parallel.use_distributed_optimizer else _gradients(trainer)
    try:
        trainer.train(poisoned(batch, 2))
        refused = False
    except NonFiniteLoss:
        refused = True
    target = Path(case["target"])
    trainer.save(target)
    if rank == 0:
        torch.save(gradients, target / "gradients.pt")
    trainer.close()
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "metrics": [dict(report.metrics) for report in reports],
        "logprobs": reports[0].logprobs,
        "refused": refused,
    }


@torch.no_grad()
def _gradients(trainer: MegatronRank) -> dict[str, torch.Tensor]:
    model, shape = trainer._model, trainer._shape  # noqa: SLF001
    parts = {name: part.main_grad for name, part in local_weights(model).items() if part.requires_grad}
    splits = splits_of(shape)
    return {name: grad.clone() for name, grad in whole_weights(parts, all_weights(parts, splits), splits, CPU)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, world_size, cases = sys.argv[1:]
    found = [run(int(rank), int(world_size), each) for each in json.loads(cases)]
    print(json.dumps(found))  # noqa: T201
