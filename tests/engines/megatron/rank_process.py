"""One rank of a trainer in several layouts, one after the other: a good step, maybe a poisoned one, and a good one.

    python -m tests.engines.megatron.rank_process RANK CASES

The last line of the output is JSON: the result of ``run`` for each case that has this rank.
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
from asyncrl.engines.megatron import TrainerSettings
from asyncrl.engines.megatron.checkpoint import gathered
from asyncrl.engines.megatron.checkpoint.directory import Origin, folder_of
from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.engines.megatron.checkpoint.writes import Target
from asyncrl.engines.megatron.weights.gathering import whole_weights
from asyncrl.engines.megatron.weights.hf_weights import splits_of
from asyncrl.engines.megatron.weights.sharding import all_weights, local_weights
from asyncrl.errors import NonFiniteLoss
from asyncrl.types import Batch
from tests.engines.megatron.checkpoint.gathered_state import gathered_as_by_megatron
from tests.engines.megatron.tiny import free_port, poisoned, random_batch, trainer_settings
from tests.engines.megatron.train.episode_batches import episode_batch, unknown, with_sets
from tests.save_targets import target as target_of

CPU = torch.device("cpu")
gathered.PIECE = 1000  # checkpoints of a tiny model are gathered in several pieces
SEVERAL = 2**14
"""Message size in bytes: holds several, but not all, weights of a tiny model."""


def case(
    checkpoint: Path,
    target: Path,
    *,
    ranks: int = 1,
    resume: Path | None = None,
    saves: bool = False,
    poisons: bool = False,
    centers: bool = False,
    layers: str | None = None,
    **parallel: Any,
) -> dict[str, Any]:
    """The task of ``run`` on ``ranks`` ranks; ``parallel`` are fields of ParallelConfig.

    With ``resume``, the ``target`` of another case, only the last step is done, from the checkpoint before it.  With
    ``layers``, the kind of layers, ranks are on GPUs, in bfloat16.  One that ``centers`` trains with score centering.
    """
    places = {"checkpoint": str(checkpoint), "target": str(target), "resume": resume and str(resume)}
    asked = {"saves": saves, "poisons": poisons, "centers": centers, "layers": layers, "parallel": parallel}
    return {**places, "port": free_port(), "ranks": ranks, **asked}


def run(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Return the report of each good step, in order, and whether the poisoned step was refused; None if there was none.

    The second good step trains episodes: observations, unknown log-probs, several samples of a rollout, and tokens that
    were drawn among a few ids.

    ``target`` gets the weights after the last step in Hugging Face format.  It gets a checkpoint from before the last
    step if the case ``saves``.  On a CPU it also gets ``gradients.pt``, the gradients of the first step's last update,
    unless each rank has the sum of only a part of the gradients.
    """
    target = Path(case["target"])
    trainer = MegatronRank(_settings(case), rank, case["ranks"], "127.0.0.1", case["port"])
    batch = random_batch(groups=3, group_size=3)
    reports, refused, gradients = [], None, {}
    if case["resume"] is None:
        reports = [trainer.train(batch)]
        gradients = _gradients(trainer) if case["layers"] is None else {}
    else:
        trainer.load(Origin(folder=folder_of(Path(case["resume"]), 1), kind="resume", optimizer=True))
    if case["poisons"]:
        refused = _refuses(trainer, poisoned(batch, 2))
    if case["saves"]:
        if case["layers"] is None:
            gathered_as_by_megatron(trainer._learner, CheckpointMemory())  # noqa: SLF001
        trainer.begin_checkpoint(_same_on_all_ranks(target_of(target, 1) if rank == 0 else None), {}, True)
        trainer.finish_checkpoint()
    reports.append(trainer.train(with_sets(unknown(episode_batch(turn_rewards=True, step=1)))))
    trainer.save(target / "hf")
    if rank == 0:
        torch.save(gradients, target / "gradients.pt")
    trainer.close()
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "metrics": [dict(report.metrics) for report in reports],
        "logprobs": [list(row) for row in reports[-1].logprobs],
        "refused": refused,
    }


def _same_on_all_ranks(target: Target | None) -> Target:
    """Return the first rank's ``target``, which a run's driver would send to all ranks."""
    found: list[Any] = [target]
    dist.broadcast_object_list(found)
    shared: Target = found[0]
    return shared


def _settings(case: dict[str, Any]) -> TrainerSettings:
    parallel = ParallelConfig(**case["parallel"])
    # 6 samples in the first update and 3 in the second, in small microbatches where ranks share them: the shares are
    # unequal, and some are empty
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    has_shares = case["ranks"] > tensor * pipeline * parallel.context_parallel_size
    changes: dict[str, Any] = {"use_rollout_logprobs": True, "num_steps_per_rollout": 2, "lr": 1e-4, "timeout_s": 120.0}
    changes |= {"max_tokens_per_gpu": 16 if has_shares else 32, "balance_data": case["ranks"] > 1}
    # a critic, a reference model, and the mean advantage over all ranks' tokens
    changes |= {"advantage_estimator": "ppo", "kl_coef": 0.1, "normalize_advantages": True}
    changes |= {"use_score_centering": case["centers"]}
    settings = trainer_settings(Path(case["checkpoint"]), **changes)
    settings = replace(settings, parallel=parallel)
    if case["layers"] is None:
        return settings
    model = replace(settings.model, transformer_impl=case["layers"])
    return replace(settings, model=model, device="cuda", dtype="bfloat16")


def _refuses(trainer: MegatronRank, batch: Batch) -> bool:
    try:
        trainer.train(batch)
    except NonFiniteLoss:
        return True
    return False


@torch.no_grad()
def _gradients(trainer: MegatronRank) -> dict[str, torch.Tensor]:
    model, shape = trainer._model, trainer._shape  # noqa: SLF001
    weights: dict[str, Any] = local_weights(model)
    parts = {name: part.main_grad for name, part in weights.items() if part.requires_grad}
    splits = splits_of(shape)
    return {name: grad.clone() for name, grad in whole_weights(parts, all_weights(parts, splits), splits, CPU, SEVERAL)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    print(json.dumps([run(rank, each) for each in cases if rank < each["ranks"]]))  # noqa: T201
