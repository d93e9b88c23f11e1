"""Rank 1 of two: training steps with our own estimator and loss, then with the same ones by path.

    custom_process.py CHECKPOINT FILE PORT

Prints the losses and norms that ``run`` returns as its last line, in JSON.
"""

import json
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from asyncrl.engines.megatron.rank import MegatronRank

from tiny import random_batch, trainer_settings

from asyncrl.compat import SlimeArgs
from asyncrl.plugins import load_custom

OURS = (None, None)
BY_PATH = ("grpo", "clipped(0.2)")
BY_TOKEN = ("grpo_by_token", None)
SLIMES = ("slimes", None)


def run(rank: int, world_size: int, checkpoint: Path, file: Path, port: int, names: Any, **changes: Any) -> list[Any]:
    """Of each of two steps, of two updates each: loss, norm, metrics, clip fraction and log-probs."""
    advantage, loss = (None if name is None else f"{file}:{name}" for name in names)
    changes = {
        "num_steps_per_rollout": 2,
        "lr": 1e-2,
        "max_tokens_per_gpu": 40,
        "timeout_s": 120.0,
        "use_rollout_logprobs": True,
    } | changes
    settings = trainer_settings(
        checkpoint, custom_advantage_function_path=advantage, custom_loss_function_path=loss, **changes
    )
    if names != OURS:
        settings = replace(settings, custom=partial(load_custom, advantage, loss, SlimeArgs(lr=1.0), file.parent))
    trainer = MegatronRank(settings, rank, world_size, "127.0.0.1", port)
    try:
        reports = [trainer.train(random_batch(groups=3, group_size=3, seed=seed)) for seed in range(2)]
    finally:
        trainer.close()
    return [
        [r.loss, r.grad_norm, r.clip_fraction, r.entropy, dict(r.metrics), [list(row) for row in r.logprobs]]
        for r in reports
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint, file, *ports = sys.argv[1:]
    found = [
        run(1, 2, Path(checkpoint), Path(file), int(port), names)
        for port, names in zip(ports, (OURS, BY_PATH), strict=True)
    ]
    print(json.dumps(found))  # noqa: T201
