"""Rank 1 of two: training steps with a user's estimator and loss, in one layout after the other.

    python -m tests.engines.megatron.train.custom_process CHECKPOINT FILE CASES

The last line of the output is JSON: the result of ``run`` for each case.
"""

import json
import sys
from array import array
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.rank import MegatronRank

from asyncrl.compat import SlimeArgs
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.errors import AsyncRLError
from asyncrl.plugins import load_custom
from asyncrl.types import Batch
from tests.engines.megatron.tiny import random_batch, trainer_settings

OURS = (None, None)
BY_PATH = ("grpo", "clipped(0.2)")
BY_TOKEN = ("grpo_by_token", None)
SLIMES = ("slimes", None)
TOUCHY = ("grpo", "touchy")
FAULTS = {"raises": -21.0, "returns one number": -22.0, "is not finite": -23.0, "raises on the way back": -24.0}
"""Old log-probs that make ``touchy`` fail on rank 1, by the kind of failure: far from any that are sampled here."""


def run(
    rank: int,
    world_size: int,
    checkpoint: Path,
    file: Path,
    port: int,
    names: Any,
    parallel: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train two steps of two updates each, after one step for each of FAULTS with TOUCHY on two ranks.

    Returns ``steps``: loss, gradient norm, clip fraction, entropy, metrics and log-probs of each of the two steps.
    Also returns ``refused``: the error of each faulty step under the name that FAULTS gives it.
    """
    advantage, loss = (None if name is None else f"{file}:{name}" for name in names)
    settings_of_all: dict[str, Any] = {
        "num_steps_per_rollout": 2,
        "lr": 1e-2,
        "max_tokens_per_gpu": 40,
        "timeout_s": 120.0,
        "use_rollout_logprobs": True,
        "parallel": ParallelConfig(**(parallel or {})),
    }
    settings = trainer_settings(
        checkpoint,
        custom_advantage_function_path=advantage,
        custom_loss_function_path=loss,
        **(settings_of_all | changes),
    )
    if tuple(names) != OURS:
        settings = replace(settings, custom=partial(load_custom, advantage, loss, SlimeArgs(lr=1.0), file.parent))
    trainer = MegatronRank(settings, rank, world_size, "127.0.0.1", port)
    faults = FAULTS if tuple(names) == TOUCHY and world_size > 1 else {}
    try:
        refused = {what: _refused(trainer, logprob) for what, logprob in faults.items()}
        reports = [trainer.train(_batch(seed)) for seed in range(2)]
    finally:
        trainer.close()
    steps = [
        [r.loss, r.grad_norm, r.clip_fraction, r.entropy, dict(r.metrics), [list(row) for row in r.logprobs]]
        for r in reports
    ]
    return {"refused": refused, "steps": steps}


def _batch(seed: int) -> Batch:
    return random_batch(groups=3, group_size=3, seed=seed)


def _refused(trainer: MegatronRank, logprob: float) -> str:
    """The error of a step whose tokens all have the old log-prob ``logprob``."""
    batch = _batch(0)
    groups = []
    for group in batch.groups:
        olds = [array("f", [logprob] * len(scored.loss_mask)) for scored in group.samples]
        samples = (
            replace(scored, sample=replace(scored.sample, logprobs=old))
            for scored, old in zip(group.samples, olds, strict=True)
        )
        groups.append(replace(group, samples=tuple(samples)))
    try:
        trainer.train(replace(batch, groups=tuple(groups)))
    except AsyncRLError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


if __name__ == "__main__":
    torch.set_num_threads(1)
    checkpoint, file, cases = sys.argv[1:]
    print(json.dumps([run(1, 2, Path(checkpoint), Path(file), **case) for case in json.loads(cases)]))  # noqa: T201
