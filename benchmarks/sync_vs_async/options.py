"""The options of ``sync_vs_async.py``, and what they say in the product's own words."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from asyncrl.capacity.trainer import RankWorkload, trainer_memory, trainer_problems, with_copy
from asyncrl.config.areas import ClusterConfig, FailureConfig, ModelConfig, TrainConfig
from asyncrl.config.parallel import ParallelConfig, parallel_problems
from asyncrl.config.ranges import refuse
from asyncrl.engines.cluster.deployment import Deployment
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.errors import ConfigError
from asyncrl.models.shape import shape_of
from benchmarks.common.parallel_options import add_parallel, parallel_of
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.arrangements import Arrangement, arrangement
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
"""Server flags that need none of SGLang's optional kernels."""
COLLECTIVE_S = 300.0
"""For one collective operation of the trainer: a rank waits for the others' share of a batch, seconds."""
CONTROL_S = 120.0
"""As in the product: for one pause, bucket or continue."""
REQUEST_S = 300.0
"""As in the product: silence of a request."""
START_S = 600.0
"""As in the product: until every process is ready."""


def parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    """What was asked for.  Leaves the program when it cannot be."""
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
    """Those asked for; else all of them that the trainer's layout allows on all GPUs.  Raises ValueError."""
    default = ARRANGEMENTS if asked.engine_gpus else ("sync-colocate",)
    chosen = [arrangement(name) for name in asked.arrangements or default]
    if not (asked.engine_gpus or all(each.colocates for each in chosen)):
        raise ValueError("--engine-gpus 0 is for sync-colocate alone, where the trainer's GPUs generate")
    gpus = asked.trainer_gpus + asked.engine_gpus
    lines = parallel_problems(parallel_of(asked), gpus)
    if lines and asked.arrangements and any(each.colocates for each in chosen):
        raise ValueError(f"sync-colocate, all {gpus} GPUs train: {lines[0]}")
    return [each for each in chosen if not (lines and each.colocates)]


def _too_small(asked: argparse.Namespace) -> list[str]:
    """One line for each deployment whose trainer does not fit on its GPUs; engines take what they are given."""
    if asked.show or asked.device == "cpu":
        return []
    shape, parallel, limit = shape_of(SHAPES[asked.model]), parallel_of(asked), asked.gpu_memory_gb * 1e9
    lines = list[str]()
    for colocates in sorted({each.colocates for each in asked.arrangements}):
        num_ranks = asked.trainer_gpus + (asked.engine_gpus if colocates else 0)
        num_tokens = _row_tokens(asked) / parallel.context_parallel_size
        work = RankWorkload(num_ranks=num_ranks, num_tokens=num_tokens, weight_bytes=2)
        if not colocates:
            work = with_copy(shape, parallel, work, limit=limit, wanted=asked.update_weights_beside_training)
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
    """What makes runs comparable."""
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
        updates_beside_training=asked.update_weights_beside_training,
    )


def deployment(
    asked: argparse.Namespace, checkpoint: Path, logs: Path, left_s: float, *, colocates: bool
) -> Deployment:
    """What to start, on all GPUs twice or on each for one thing; the start may take ``left_s`` at most."""
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
                update_weights_beside_training=asked.update_weights_beside_training,
            ),
            parallel=parallel_of(asked),
            device=asked.device,
            dtype="bfloat16" if asked.device == "cuda" else "float32",
            temperature=TEMPERATURE,
            num_steps_per_rollout=1,
            use_rollout_logprobs=True,  # for sync as well: it spares it a pass
            timeout_s=COLLECTIVE_S,
            row_tokens=_row_tokens(asked),
        ),
        server_flags=server_flags(asked),
        logs=logs,
    )


def server_flags(asked: argparse.Namespace) -> dict[str, str | bool]:
    """Of SGLang: ours for GPUs, and those given, which win."""
    given = dict(_flag(text) for text in asked.sglang)
    return {**(ON_GPUS if asked.device == "cuda" else {}), **given}


def _flag(text: str) -> tuple[str, str | bool]:
    """``name=value``; a bare name is a bare flag, ``name=false`` leaves ours out."""
    name, equals, value = text.removeprefix("--").partition("=")
    return name, (False if value == "false" else value) if equals else True


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync_vs_async",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what")
    known = f"sync, sync-colocate, one-step, S=N; default: {' '.join(ARRANGEMENTS)}"
    what.add_argument("--arrangements", nargs="+", help=known)
    what.add_argument("--model", choices=list(SHAPES), default="1.7b", help="a shape; its weights are random")
    what.add_argument("--groups", type=int, default=32, help="prompts per step")
    what.add_argument("--group-size", type=int, default=8, help="samples per prompt")
    what.add_argument("--longest", type=int, default=8192, help="answer, in tokens")
    what.add_argument("--median", type=int, help=f"of the answers; default: --longest / {CUT_RATIO}")
    what.add_argument("--prompt-tokens", type=int, default=128)
    what.add_argument("--seed", type=int, default=1234, help="of the first repeat; the next has the next one")
    where = parser.add_argument_group("where")
    where.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    where.add_argument("--trainer-gpus", type=int, default=1, help="ranks; on a CPU, processes")
    where.add_argument(
        "--engine-gpus",
        type=int,
        default=1,
        help="engines of one GPU each; on a CPU, processes; 0: sync-colocate alone",
    )
    where.add_argument("--concurrency", type=int, default=256, help="samples in flight per engine")
    where.add_argument("--max-tokens-per-gpu", type=int, default=16_384, help="of a microbatch of the trainer")
    where.add_argument("--update-weights-beside-training", action=argparse.BooleanOptionalAction, help="as in a run")
    where.add_argument("--gpu-memory-gb", type=float, default=ClusterConfig().gpu_memory_gb, help="of 10^9 bytes")
    where.add_argument("--sglang", action="append", default=[], metavar="NAME[=VALUE]", help="server flag; NAME=false")
    _add_how_long(parser)
    add_parallel(parser.add_argument_group("how the trainer is split (docs/parallelism.md)"))
    return parser


def _add_how_long(parser: argparse.ArgumentParser) -> None:
    how_long = parser.add_argument_group("how long, and what is left of it")
    how_long.add_argument("--steps", type=int, default=8, help="measured per run, rounded up to whole rounds of S + 1")
    how_long.add_argument("--seconds", type=float, default=float("inf"), help="after which no other round begins")
    how_long.add_argument("--full-s", type=float, default=15.0, help="of full engines alone, first; 0: not at all")
    how_long.add_argument("--repeats", type=int, default=1, help="of all arrangements")
    how_long.add_argument("--deadline-s", type=float, default=3600.0, help="then it shows what it has")
    how_long.add_argument("--out", type=Path, default=Path("runs/sync_vs_async"), help="folder for all files")
    how_long.add_argument("--checkpoint", type=Path, help="folder to keep the model in, or one kept before")
    how_long.add_argument("--commit", help="what to write down where there is no git")
    how_long.add_argument("--show", type=Path, nargs="+", help="start nothing; join results.json of earlier calls")
