"""One rank of a trainer that replays random routes, in several models and layouts, one after the other.

    python -m tests.engines.megatron.routing_process RANK CASES

The last line of the output is JSON: the result of ``run`` for each case that has this rank.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.rank import MegatronRank

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.models.shape import read_shape
from tests.engines.megatron.routed import aged, routed
from tests.engines.megatron.tiny import free_port, random_batch, trainer_settings
from tests.forks import Fork


def case(checkpoint: Path, *, ranks: int = 1, replays: bool = True, **parallel: Any) -> dict[str, Any]:
    """The task of ``run`` on ``ranks`` ranks; ``parallel`` are fields of ParallelConfig."""
    asked = {"ranks": ranks, "replays": replays, "parallel": parallel}
    return {"checkpoint": str(checkpoint), "port": free_port(), **asked}


def run(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Train two steps of two updates each.

    The log-probs of the second update's samples come from a pass before the step, those of the first from its training.
    """
    checkpoint = Path(case["checkpoint"])
    # Some ranks have several microbatches, of several samples or of one, and some have empty ones.
    changes: dict[str, Any] = {"num_steps_per_rollout": 2, "lr": 1e-4, "timeout_s": 120.0, "max_tokens_per_gpu": 24}
    changes |= {"balance_data": case["ranks"] > 1}
    settings = replace(trainer_settings(checkpoint, **changes), parallel=ParallelConfig(**case["parallel"]))
    trainer = MegatronRank(settings, rank, case["ranks"], "127.0.0.1", case["port"])
    batches = [aged(random_batch(groups=2, group_size=3, seed=step, step=step)) for step in range(2)]
    if case["replays"]:
        shape = read_shape(checkpoint)
        batches = [routed(batch, shape, seed=batch.step, share_missing=0.3 * batch.step) for batch in batches]
    reports = [trainer.train(batch) for batch in batches]
    trainer.close()
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "metrics": [dict(report.metrics) for report in reports],
        "logprobs": [[list(row) for row in report.logprobs] for report in reports],
    }


@contextmanager
def other_ranks(cases: list[dict[str, Any]]) -> Iterator[list[Popen[str]]]:
    """All ranks but the first, each in a separate process."""
    with ExitStack() as stack:
        others = range(1, max(case["ranks"] for case in cases))
        yield [stack.enter_context(_process(rank, cases)) for rank in others]


@contextmanager
def _process(rank: int, cases: list[dict[str, Any]]) -> Iterator[Popen[str]]:
    process = Fork("tests.engines.megatron.routing_process", rank, json.dumps(cases), stdout=PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    print(json.dumps([run(rank, each) for each in cases if rank < each["ranks"]]))  # noqa: T201
