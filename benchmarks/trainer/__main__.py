"""One training step: tokens/s, the share of what the GPU's matrix units can do, memory, and where the time goes.

    uv run python -m benchmarks.trainer --model 1.7b --tokens 32768                       one GPU
    uv run python -m benchmarks.trainer --model 1.7b --ranks 2 --tensor-model-parallel-size 2
    uv run python -m benchmarks.trainer --model moe-6b --ranks 4 --expert-model-parallel-size 4
    uv run python -m benchmarks.trainer --model 1.7b --profile                            the kernels that take longest
    uv run python -m benchmarks.trainer --model tiny --device cpu --tokens 256            on any machine

A model of random weights takes steps on random answers, all of ``--sample-tokens``; every flag of
docs/parallelism.md may be given.  The rate of a large matrix product is measured on the same GPU in the same
run.  Model FLOPs are 6 per token and weight that it meets in a matrix product, and 6 x heads x head size x context of
attention, causal; what is computed a second time to save memory does not count.  The first step is left out.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from asyncrl.config.areas import ModelConfig, TrainConfig, TransformerImpl
from asyncrl.config.parallel import ParallelConfig
from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.types import Batch, FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights
from benchmarks.common.devices import need
from benchmarks.common.parallel_options import add_parallel, parallel_of
from benchmarks.common.shapes import SHAPES, num_weights, write_random

GROUP_SIZE = 2
PROMPT_TOKENS = 64
START = Weights(version=0, step=0)
TOP_KERNELS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """What rank 0 saw, in seconds, GiB and FLOP/s."""

    step_s: tuple[float, ...]
    memory_gib: float
    matrix_rate: float
    layers: str
    kernels: str


def main(argv: Sequence[str]) -> int:
    """Measure and show what ``argv`` asks for; the exit code."""
    asked = _parser().parse_args(argv)
    need(asked.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_random(Path(folder) / "hf", asked.model, device=asked.device)
        found = _measured(asked, checkpoint)
    _show(asked, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="1.7b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32_768, help="of a microbatch (--max-tokens-per-gpu)")
    parser.add_argument("--sample-tokens", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=2, help="per step and data-parallel rank")
    parser.add_argument("--steps", type=int, default=4, help="the first of which is left out")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="for all of it")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--transformer-impl", choices=get_args(TransformerImpl), default="auto")
    add_parallel(parser)
    return parser


def _settings(asked: argparse.Namespace, checkpoint: Path) -> TrainerSettings:
    return TrainerSettings(
        model=ModelConfig(hf_checkpoint=checkpoint, transformer_impl=asked.transformer_impl),
        train=TrainConfig(max_tokens_per_gpu=asked.tokens, lr=1e-6, balance_data=True),
        parallel=parallel_of(asked),
        device=asked.device,
        dtype="bfloat16" if asked.device == "cuda" else "float32",
        temperature=1.0,
        num_steps_per_rollout=1,
        use_rollout_logprobs=True,
        timeout_s=300.0,
    )


def _num_samples(asked: argparse.Namespace) -> int:
    parallel = parallel_of(asked)
    copies = asked.ranks // parallel.ranks_per_copy
    row_tokens: int = asked.tokens * parallel.context_parallel_size
    samples: int = copies * asked.microbatches * row_tokens // asked.sample_tokens
    return max(GROUP_SIZE, samples // GROUP_SIZE * GROUP_SIZE)


def _measured(asked: argparse.Namespace, checkpoint: Path) -> StepMeasurement:
    """By one process for each rank, this one not among them."""
    (port,) = NetworkPlace().free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    answers: Any = spawn.SimpleQueue()
    settings = _settings(asked, checkpoint)
    ranks = [spawn.Process(target=_rank, args=(asked, settings, rank, port, answers)) for rank in range(asked.ranks)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + asked.deadline_s
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
    codes = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
    if any(code != 0 for code in codes):
        raise SystemExit(f"not all ranks ended well in {asked.deadline_s:g} s: exit codes {codes}")
    found: StepMeasurement = answers.get()
    return found


def _rank(asked: argparse.Namespace, settings: TrainerSettings, rank: int, port: int, answers: Any) -> None:
    import torch

    from asyncrl.engines.megatron.rank import MegatronRank

    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    if asked.device == "cpu":
        torch.set_num_threads(1)
    rate = _matrix_rate(asked.device, rank)
    trainer = MegatronRank(settings, rank, asked.ranks, "127.0.0.1", port)
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(asked.steps):
        seconds.append(_timed(trainer, _batch(asked, step), asked.device))
    kernels = _kernels(trainer, _batch(asked, asked.steps), asked.device) if asked.profile else ""
    if rank == 0:
        memory = torch.cuda.max_memory_allocated() / 2**30 if asked.device == "cuda" else 0.0
        answers.put(
            StepMeasurement(
                step_s=tuple(seconds[1:]),
                memory_gib=memory,
                matrix_rate=rate,
                layers=trainer.layers,
                kernels=kernels,
            )
        )
    trainer.close()


def _timed(trainer: Any, batch: Batch, device: str) -> float:
    import torch

    started = time.perf_counter()
    trainer.train(batch)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _kernels(trainer: Any, batch: Batch, device: str) -> str:
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        _timed(trainer, batch, device)
    by = "device_time_total" if device == "cuda" else "self_cpu_time_total"
    table: str = seen.key_averages().table(sort_by=by, row_limit=TOP_KERNELS, max_name_column_width=90)
    return table


def _matrix_rate(device: str, rank: int) -> float:
    """FLOP/s of a large square product, in the dtype that training uses: the best of several."""
    import torch

    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    one, other = (torch.randn(size, size, device=where, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        if device == "cuda":
            torch.cuda.synchronize(where)
        started = time.perf_counter()
        for _ in range(10):
            one @ other
        if device == "cuda":
            torch.cuda.synchronize(where)
        best = min(best, (time.perf_counter() - started) / 10)
    return 2 * size**3 / best


def _batch(asked: argparse.Namespace, step: int) -> Batch:
    """The same on every rank."""
    rng = random.Random(step)
    vocab = SHAPES[asked.model]["vocab_size"]
    prompt_tokens = min(PROMPT_TOKENS, asked.sample_tokens // 2)
    length = asked.sample_tokens + 1 - prompt_tokens  # nothing is predicted from the last token, so it does not enter

    def scored(index: int) -> ScoredSample:
        sample = Sample(
            index=index,
            token_ids=tuple(rng.choices(range(vocab), k=length)),
            logprobs=array("f", [-12.0]) * length,
            spans=(Span(weights=START, start=0, stop=length),),
            text="",
            finish=FinishReason.LENGTH,
            seconds=1.0,
        )
        return ScoredSample(sample=sample, reward=float(index % 2), loss_mask=(1,) * length)

    groups = tuple(
        ScoredGroup(
            group_id=GroupId(number),
            prompt=Prompt(
                row=number, epoch=0, text="", token_ids=tuple(rng.choices(range(vocab), k=prompt_tokens)), label=None
            ),
            dispatched=START,
            samples=tuple(scored(index) for index in range(GROUP_SIZE)),
        )
        for number in range(_num_samples(asked) // GROUP_SIZE)
    )
    return Batch(step=step, groups=groups)


def _show(asked: argparse.Namespace, found: StepMeasurement) -> None:
    tokens = _num_samples(asked) * asked.sample_tokens
    config = SHAPES[asked.model]
    attention = 6 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    flops = tokens * (6 * num_weights(asked.model, active=True) + attention * asked.sample_tokens)
    step_s = min(found.step_s)
    per_gpu = flops / step_s / asked.ranks
    table = Table("what", "figure")
    sizes = {field.name: getattr(asked, field.name) for field in fields(ParallelConfig)}
    split = [f"{name} {value}" for name, value in sizes.items() if value not in (None, 1, ()) and value is not True]
    table.add_row("model", f"{asked.model}, {num_weights(asked.model, active=False) / 1e9:.2f} billion weights")
    table.add_row("ranks", f"{asked.ranks}; {', '.join(split) or 'as it comes'}")
    table.add_row("layers", found.layers)
    table.add_row("tokens per step", f"{tokens:,}; {asked.tokens:,} per microbatch, {asked.sample_tokens:,} per sample")
    table.add_row("step", f"{step_s:.3f} s, best of {', '.join(f'{each:.3f}' for each in found.step_s)}")
    table.add_row("tokens/s", f"{tokens / step_s:,.0f}")
    table.add_row("model FLOP/s per rank", f"{per_gpu / 1e12:.1f} T")
    table.add_row("matrix product FLOP/s", f"{found.matrix_rate / 1e12:.1f} T")
    table.add_row("share", f"{per_gpu / found.matrix_rate:.1%}")
    table.add_row("peak memory", f"{found.memory_gib:.1f} GiB")
    console = Console(width=150)
    console.print(table)
    if found.kernels:
        console.print(found.kernels, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main(sys.argv[1:]))
