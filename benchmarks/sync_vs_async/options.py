"""The options of ``benchmarks.sync_vs_async``, and the product's configuration that follows from them."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from asyncrl.capacity.trainer import RankWorkload, trainer_memory, trainer_problems, with_copy
from asyncrl.config.areas import ClusterConfig, FailureConfig, ModelConfig, TrainConfig
from asyncrl.config.areas.parallel import ParallelConfig, parallel_problems
from asyncrl.config.areas.ranges import refuse
from asyncrl.engines.cluster.settings import Deployment, routes_shape
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.errors import ConfigError
from asyncrl.models.shape import shape_of
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.parallel_options import add_parallel, parallel_of
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.arrangements import NO_REPLAY, Arrangement, arrangement
from benchmarks.sync_vs_async.figures import Setup
from benchmarks.sync_vs_async.run import TEMPERATURE
from benchmarks.sync_vs_async.workload import CUT_RATIO

ARRANGEMENTS = ("sync", "sync-colocate", "one-step", "S=1", "S=2", "S=4")
ON_GPUS: Mapping[str, str | bool] = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-prefill-cuda-graph": True,
    "cuda-graph-max-bs-decode": "256",
}
"""Server flags for GPUs on which SGLang has none of its optional kernels."""
COLLECTIVE_S = 300.0
"""Seconds for one collective operation of the trainer, in which a rank waits for the others' share of a batch."""
CONTROL_S = 120.0
"""Seconds for one pause, bucket or resume; the product's default."""
REQUEST_S = 300.0
"""Seconds of silence of a request; the product's default."""
START_S = 600.0
"""Seconds until every process is ready; the product's default."""


def parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    """Parse ``argv``.  Exits with code 2 and one line if an option is wrong."""
    parser = _parser(description)
    asked = parser.parse_args(argv)
    asked.median = asked.median or max(1, asked.longest // CUT_RATIO)
    if asked.longest < asked.median:
        parser.error(f"--longest {asked.longest} is below --median {asked.median}")
    if asked.engine_gpus < 0:
        parser.error(f"--engine-gpus must be at least 0, got {asked.engine_gpus}")
    for name in ("trainer_gpus", "groups", "group_size", "steps", "repeats", "concurrency"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(asked, name)}")
    try:
        refuse(parallel_problems(parallel_of(asked), asked.trainer_gpus))
        asked.arrangements = _arrangements(asked)
        refuse(_too_small(asked))
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    return asked


def _arrangements(asked: argparse.Namespace) -> list[Arrangement]:
    """The given arrangements, else all that the trainer's layout allows on all GPUs.  Raises ValueError."""
    default = ARRANGEMENTS if asked.engine_gpus else ("sync-colocate",)
    chosen = [arrangement(name) for name in asked.arrangements or default]
    if not (asked.engine_gpus or all(each.colocates for each in chosen)):
        raise ValueError("--engine-gpus 0 allows only sync-colocate, where the trainer's GPUs generate too")
    gpus = asked.trainer_gpus + asked.engine_gpus
    lines = parallel_problems(parallel_of(asked), gpus)
    if lines and asked.arrangements and any(each.colocates for each in chosen):
        raise ValueError(f"sync-colocate trains on all {gpus} GPUs: {lines[0]}")
    return [each for each in chosen if not (lines and each.colocates)]


def _too_small(asked: argparse.Namespace) -> list[str]:
    """One line for each deployment whose trainer does not fit on its GPUs; engines use the memory they are given."""
    if asked.show or asked.device == "cpu":
        return []
    shape, parallel, limit = shape_of(SHAPES[asked.model]), parallel_of(asked), asked.gpu_memory_gb * 1e9
    lines = list[str]()
    for colocates in sorted({each.colocates for each in asked.arrangements}):
        num_ranks = asked.trainer_gpus + (asked.engine_gpus if colocates else 0)
        num_tokens = _row_tokens(asked) / parallel.context_parallel_size
        work = RankWorkload(num_ranks=num_ranks, num_tokens=num_tokens, weight_bytes=2)
        if not colocates:
            work = with_copy(shape, parallel, work, limit=limit, wanted=asked.update_weights_during_training)
        stages = trainer_memory(shape, parallel, work)
        lines += trainer_problems(stages, num_tokens=num_tokens, limit=limit)
    return lines


def _row_tokens(asked: argparse.Namespace) -> int:
    """Most tokens of a microbatch, over the context-parallel ranks that share it."""
    parallel = parallel_of(asked)
    longest: int = asked.prompt_tokens + asked.longest
    packed: int = asked.max_tokens_per_gpu * parallel.context_parallel_size
    return max(longest, packed)


def setup(asked: argparse.Namespace) -> Setup:
    """The settings that runs must share to be compared."""
    default = ParallelConfig()
    given = {field.name: getattr(parallel_of(asked), field.name) for field in fields(ParallelConfig)}
    return Setup(
        model=asked.model,
        device=asked.device,
        trainer_gpus=asked.trainer_gpus,
        engine_gpus=asked.engine_gpus,
        slots=asked.concurrency,
        groups=asked.groups,
        group_size=asked.group_size,
        median=asked.median,
        longest=asked.longest,
        prompt_tokens=asked.prompt_tokens,
        max_tokens_per_gpu=asked.max_tokens_per_gpu,
        parallel={name: value for name, value in given.items() if value != getattr(default, name)},
        updates_beside_training=asked.update_weights_during_training,
    )


def deployment(
    asked: argparse.Namespace, checkpoint: Path, logs: Path, left_s: float, *, colocates: bool
) -> Deployment:
    """The deployment to start, on all GPUs for both uses or on each for one; it may take ``left_s`` to start."""
    gpus = asked.trainer_gpus + asked.engine_gpus
    return Deployment(
        cluster=ClusterConfig(
            actor_num_gpus_per_node=gpus if colocates else asked.trainer_gpus,
            rollout_num_gpus=gpus if colocates else asked.engine_gpus,
            colocate=colocates,
            use_router=False,
            start_timeout_s=min(START_S, left_s),
        ),
        failures=FailureConfig(
            request_timeout_s=REQUEST_S,
            control_timeout_s=CONTROL_S,
            train_timeout_s=max(COLLECTIVE_S, asked.deadline_s),
            max_engine_restarts=0,
        ),
        trainer=TrainerSettings(
            model=ModelConfig(hf_checkpoint=checkpoint, seed=asked.seed),
            train=TrainConfig(
                max_tokens_per_gpu=asked.max_tokens_per_gpu,
                lr=1e-6,
                balance_data=True,
                update_weights_during_training=asked.update_weights_during_training,
            ),
            parallel=parallel_of(asked),
            device=asked.device,
            dtype="bfloat16" if asked.device == "cuda" else "float32",
            temperature=TEMPERATURE,
            num_steps_per_rollout=1,
            use_rollout_logprobs=True,  # for sync as well, which saves it a forward pass
            timeout_s=COLLECTIVE_S,
            row_tokens=_row_tokens(asked),
        ),
        server_flags=server_flags(asked),
        logs=logs,
        routes=routes_shape(shape_of(SHAPES[asked.model])) if _replays(asked) else None,
    )


def _replays(asked: argparse.Namespace) -> bool:
    """Whether any arrangement replays routes.  Engines record none otherwise, which costs them time."""
    return any(each.replays_routes for each in asked.arrangements)


def server_flags(asked: argparse.Namespace) -> dict[str, str | bool]:
    """Server flags of SGLang: ours for GPUs, and the given ones, which take precedence."""
    given = dict(_flag(text) for text in asked.sglang)
    return {**(ON_GPUS if asked.device == "cuda" else {}), **given}


def _flag(text: str) -> tuple[str, str | bool]:
    """Name and value of ``name=value``.  A bare name is a flag without value; ``name=false`` leaves ours out."""
    name, equals, value = text.removeprefix("--").partition("=")
    return name, (False if value == "false" else value) if equals else True


def _parser(description: str) -> argparse.ArgumentParser:
    parser = parser_of("sync_vs_async", description)
    _add_workload(parser.add_argument_group("workload"))
    _add_deployment(parser.add_argument_group("deployment"))
    _add_length(parser.add_argument_group("length and results"))
    add_parallel(parser.add_argument_group("layout of the trainer (docs/parallelism.md)"))
    return parser


def _add_workload(group: Any) -> None:
    known = (
        f"sync, sync-colocate, one-step or S=N; with {NO_REPLAY}: no routing replay (default: {' '.join(ARRANGEMENTS)})"
    )
    add_option(group, "--arrangements", str, known, nargs="+")
    add_option(group, "--model", str, "shape of the model, which gets random weights", "1.7b", choices=list(SHAPES))
    add_option(group, "--groups", int, "prompts per step", 32)
    add_option(group, "--group-size", int, "samples per prompt", 8)
    add_option(group, "--longest", int, "longest answer, in tokens", 8192)
    add_option(group, "--median", int, f"median answer length, in tokens (default: --longest / {CUT_RATIO})")
    add_option(group, "--prompt-tokens", int, "tokens of each prompt", 128)
    add_option(group, "--seed", int, "seed of the first repeat; each further one adds 1", 1234)


def _add_deployment(group: Any) -> None:
    add_option(group, "--device", str, "device of trainer and engines", "cuda", choices=["cuda", "cpu"])
    add_option(group, "--trainer-gpus", int, "trainer ranks, one GPU each; on a CPU, processes", 1)
    add_option(
        group, "--engine-gpus", int, "engines, one GPU each; on a CPU, processes; 0: only sync-colocate is possible", 1
    )
    add_option(group, "--concurrency", int, "samples in flight per engine", 256)
    add_option(group, "--max-tokens-per-gpu", int, "tokens per microbatch of the trainer", 16_384)
    group.add_argument(
        "--update-weights-during-training",
        action=argparse.BooleanOptionalAction,
        help="the flag of a run (default: where memory allows)",
    )
    memory_gb = ClusterConfig().gpu_memory_gb
    add_option(group, "--gpu-memory-gb", float, "memory of a GPU, in GB of 10^9 bytes", memory_gb)
    group.add_argument(
        "--sglang",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="server flag of SGLang; NAME=false leaves out one of ours",
    )


def _add_length(group: Any) -> None:
    add_option(group, "--steps", int, "measured steps per run, rounded up to whole rounds of S + 1", 8)
    add_option(group, "--seconds", float, "measured seconds after which no other round starts", float("inf"))
    add_option(group, "--full-s", float, "seconds to measure full engines alone, first; 0: not at all", 15.0)
    add_option(group, "--repeats", int, "runs of each arrangement", 1)
    add_option(group, "--deadline-s", float, "seconds after which it stops and shows its results", 3600.0)
    add_option(group, "--out", Path, "folder for all files", Path("runs/sync_vs_async"))
    add_option(group, "--checkpoint", Path, "folder to keep the model in, or one that has it")
    add_option(group, "--commit", str, "commit to record where there is no git")
    add_option(group, "--show", Path, "results.json files of earlier calls to join, without a run", nargs="+")
