"""One rank of a trainer: two good steps and a poisoned one, then a save.

    rank_process.py CHECKPOINT TARGET RANK WORLD_SIZE PORT

As a process of its own it prints what ``run`` returns as its last line, in JSON.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from asyncrl.engines.megatron.rank import MegatronRank

from tiny import poisoned, random_batch, trainer_settings

from asyncrl.errors import NonFiniteLoss


def run(checkpoint: Path, target: Path, rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Losses and further numbers, log-probs of the first step, and whether the poisoned step was refused."""
    # 6 samples in the first update and 3 in the second, in small microbatches: unequal shares, some of them empty
    changes = {"use_rollout_logprobs": True, "num_steps_per_rollout": 2, "lr": 1e-4, "timeout_s": 120.0}
    changes |= {"max_tokens_per_gpu": 8, "balance_data": world_size > 1}
    # a critic, a reference model, and the mean advantage over all ranks' tokens
    changes |= {"advantage_estimator": "ppo", "kl_coef": 0.1, "normalize_advantages": True}
    settings = trainer_settings(checkpoint, **changes)
    trainer = MegatronRank(settings, rank, world_size, "127.0.0.1", port)
    batch = random_batch(groups=3, group_size=3)
    reports = [trainer.train(batch) for _ in range(2)]
    try:
        trainer.train(poisoned(batch, 2))
        refused = False
    except NonFiniteLoss:
        refused = True
    trainer.save(target)
    trainer.close()
    return {
        "losses": [report.loss for report in reports],
        "metrics": [dict(report.metrics) for report in reports],
        "logprobs": reports[0].logprobs,
        "refused": refused,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint, target, rank, world_size, port = sys.argv[1:]
    print(json.dumps(run(Path(checkpoint), Path(target), int(rank), int(world_size), int(port))))  # noqa: T201
