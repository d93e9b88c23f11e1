"""The ranks of a trainer, each in a separate process, and the measurement of training steps on them.

Their functions are outside of ``__main__``, which a spawned process does not import.
"""

import argparse
import multiprocessing
import os
import random
import resource
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.areas import ModelConfig, TrainConfig
from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.engines.megatron.checkpoint.lease import take
from asyncrl.engines.megatron.checkpoint.writes import Target
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.sim.model.lengths import Drawn, LogNormal
from asyncrl.types import Batch, FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights
from benchmarks.common.parallel_options import parallel_of
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.workload import P95_RATIO

GROUP_SIZE = 2
PROMPT_TOKENS = 64
START = Weights(version=0, step=0)
TOP_KERNELS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasurement:
    """Figures of rank 0, in seconds, GiB and FLOP/s."""

    step_s: tuple[float, ...]
    replay_s: tuple[float, ...]
    """Steps with routing replay, each on the samples of the step at its place in ``step_s``; empty: not asked for."""
    memory_gib: float
    matrix_rate: float
    layers: str
    kernels: str
    save_s: tuple[float, ...]
    """Time that training waited for each checkpoint."""
    written_s: tuple[float, ...]
    """Time from the beginning of each checkpoint to its last byte on the disk."""
    host_gib: float
    """The most host memory of all ranks together, of which shared pages count for each rank."""


def measured(asked: argparse.Namespace, checkpoint: Path) -> StepMeasurement:
    """Measure with one new process for each rank.  Raises SystemExit if one fails or ``--deadline-s`` is over."""
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
        raise SystemExit(f"error: a rank failed or took more than {asked.deadline_s:g} s: exit codes {codes}")
    found: StepMeasurement = answers.get()
    return found


def sample_lengths(asked: argparse.Namespace) -> tuple[int, ...]:
    """Tokens of each sample of a step: as many samples as fill the microbatches, in whole groups."""
    parallel = parallel_of(asked)
    copies = asked.ranks // parallel.ranks_per_copy
    row_tokens: int = asked.tokens * parallel.context_parallel_size
    wanted, longest = copies * asked.microbatches * row_tokens, asked.sample_tokens
    if asked.median_tokens is None:
        return (longest,) * int(max(GROUP_SIZE, wanted // longest // GROUP_SIZE * GROUP_SIZE))
    drawn = Drawn(shape=LogNormal(median=asked.median_tokens, p95_ratio=P95_RATIO), cut=longest, seed=0)
    lengths: list[int] = []
    while sum(lengths) < wanted or len(lengths) % GROUP_SIZE:
        lengths.append(max(_prompt_tokens(asked) + 1, drawn.tokens(len(lengths), 0)))
    return tuple(lengths)


def _prompt_tokens(asked: argparse.Namespace) -> int:
    return min(PROMPT_TOKENS, int(asked.sample_tokens) // 2)


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


def _rank(asked: argparse.Namespace, settings: TrainerSettings, rank: int, port: int, answers: Any) -> None:
    import torch

    from asyncrl.engines.megatron.rank import MegatronRank
    from benchmarks.trainer.own_routes import with_own_routes

    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    if asked.device == "cpu":
        torch.set_num_threads(1)
    rate = _matrix_rate(asked.device, rank)
    trainer = MegatronRank(settings, rank, asked.ranks, "127.0.0.1", port)
    if asked.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, replayed = [], []
    for step in range(asked.steps):
        batch = _batch(asked, step)
        routed = with_own_routes(trainer, batch) if asked.replay else None
        seconds.append(_timed(trainer, batch, asked.device))
        if routed is not None:
            replayed.append(_timed(trainer, routed, asked.device))
    kernels = _kernels(trainer, _batch(asked, asked.steps), asked.device) if asked.profile else ""
    save_s, written_s = _saved(trainer, Path(asked.save), asked.saves) if asked.saves else ((), ())
    host_gib = _host_gib()
    if rank == 0:
        memory = torch.cuda.max_memory_allocated() / 2**30 if asked.device == "cuda" else 0.0
        answers.put(
            StepMeasurement(
                step_s=tuple(seconds[1:]),
                replay_s=tuple(replayed[1:]),
                memory_gib=memory,
                matrix_rate=rate,
                layers=trainer.layers,
                kernels=kernels,
                save_s=save_s,
                written_s=written_s,
                host_gib=host_gib,
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


def _saved(trainer: Any, root: Path, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Write ``count`` checkpoints to ``root``, one after another; return the seconds of waiting, and of writing."""
    import torch.distributed as dist

    found: list[Any] = [take(root, say=lambda line: None) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    waits, writes = [], []
    for step in range(1, count + 1):
        dist.barrier()
        started = time.perf_counter()
        trainer.begin_checkpoint(Target(claim=found[0], step=step, keep=1), {}, with_optimizer=True)
        waits.append(time.perf_counter() - started)
        trainer.finish_checkpoint()
        writes.append(time.perf_counter() - started)
    return tuple(waits), tuple(writes)


def _host_gib() -> float:
    """Return the sum of the ranks' largest memories in GiB.  Collective."""
    import torch.distributed as dist

    largest: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(largest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return sum(largest) / 2**20


def _kernels(trainer: Any, batch: Batch, device: str) -> str:
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        _timed(trainer, batch, device)
    by = "device_time_total" if device == "cuda" else "self_cpu_time_total"
    table: str = seen.key_averages().table(sort_by=by, row_limit=TOP_KERNELS, max_name_column_width=90)
    return table


def _matrix_rate(device: str, rank: int) -> float:
    """FLOP/s of a large square product in the dtype of training, the best of several."""
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
    """The batch of a step, the same on every rank."""
    rng = random.Random(step)
    vocab = SHAPES[asked.model]["vocab_size"]
    prompt_tokens = _prompt_tokens(asked)
    lengths = iter(sample_lengths(asked))

    def scored(index: int) -> ScoredSample:
        length = next(lengths) + 1 - prompt_tokens  # the last token predicts nothing and does not enter
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
        for number in range(len(sample_lengths(asked)) // GROUP_SIZE)
    )
    return Batch(step=step, groups=groups)
