"""The ranks of a trainer, each in a separate process, and the measurement of training steps on them.

Their functions are outside of ``__main__``, which a spawned process does not import.
"""

import argparse
import multiprocessing
import os
import random
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.areas import ModelConfig, TrainConfig
from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.engines.megatron.setup.settings import TrainerSettings
from asyncrl.token_columns import Routes
from asyncrl.types import Batch, FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Weights
from benchmarks.common.parallel_options import parallel_of
from benchmarks.common.shapes import SHAPES

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


def num_samples(asked: argparse.Namespace) -> int:
    """Samples per step: as many as fill the microbatches, in whole groups."""
    parallel = parallel_of(asked)
    copies = asked.ranks // parallel.ranks_per_copy
    row_tokens: int = asked.tokens * parallel.context_parallel_size
    samples: int = copies * asked.microbatches * row_tokens // asked.sample_tokens
    return max(GROUP_SIZE, samples // GROUP_SIZE * GROUP_SIZE)


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
        seconds.append(_timed(trainer, batch, asked.device))
        if asked.replay:
            replayed.append(_timed(trainer, _with_routes(batch, SHAPES[asked.model], step), asked.device))
    kernels = _kernels(trainer, _batch(asked, asked.steps), asked.device) if asked.profile else ""
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
            )
        )
    trainer.close()


def _with_routes(batch: Batch, config: Mapping[str, Any], seed: int) -> Batch:
    """Give every sample random routes, as if its engine had chosen other experts than the trainer would."""
    rng = np.random.default_rng(seed)
    num_experts, num_chosen = config["num_experts"], config["num_experts_per_tok"]

    def routed(prompt: Prompt, scored: ScoredSample) -> ScoredSample:
        num_positions = len(prompt.token_ids) + len(scored.sample.token_ids) - 1
        first = rng.integers(num_experts, size=(num_positions, config["num_hidden_layers"], 1))
        experts = (first + np.arange(num_chosen) * (num_experts // num_chosen)) % num_experts
        routes = Routes(experts_NLK=experts.astype(np.uint8 if num_experts <= 256 else np.uint16))
        return replace(scored, sample=replace(scored.sample, routes=routes))

    return replace(
        batch,
        groups=tuple(
            replace(group, samples=tuple(routed(group.prompt, each) for each in group.samples))
            for group in batch.groups
        ),
    )


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
    prompt_tokens = min(PROMPT_TOKENS, asked.sample_tokens // 2)
    length = asked.sample_tokens + 1 - prompt_tokens  # the last token predicts nothing and does not enter

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
        for number in range(num_samples(asked) // GROUP_SIZE)
    )
    return Batch(step=step, groups=groups)
