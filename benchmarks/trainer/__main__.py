"""One training step: tokens/s, the share of the GPU's peak matrix rate, memory, and the kernels that take longest.

    uv run python -m benchmarks.trainer --model 1.7b --tokens 32768                               one GPU
    uv run python -m benchmarks.trainer --model 1.7b --ranks 2 --tensor-model-parallel-size 2     two GPUs
    uv run python -m benchmarks.trainer --model moe-6b --ranks 4 --expert-model-parallel-size 4   four GPUs
    uv run python -m benchmarks.trainer --model moe-6b --replay                                   cost of routing replay
    uv run python -m benchmarks.trainer --model 1.7b --profile                                    table of kernels
    uv run python -m benchmarks.trainer --model 0.6b --saves 4                                    waits for checkpoints
    uv run python -m benchmarks.trainer --model tiny --device cpu --tokens 256                    any machine

A model of random weights is trained on answers of ``--sample-tokens`` each.  Every flag of docs/parallelism.md is
accepted.  The rate of a large matrix product is measured on the same GPU in the same run.  Model FLOPs are 6 per token
and parameter that it meets in a matrix product, and 6 x heads x head size x context for causal attention.  Recomputed
activations do not count.  The first step is left out.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import get_args

from rich.console import Console
from rich.table import Table

from asyncrl.config.areas import TransformerImpl
from asyncrl.config.areas.parallel import ParallelConfig
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.devices import need
from benchmarks.common.parallel_options import add_parallel
from benchmarks.common.shapes import SHAPES, num_weights, write_random
from benchmarks.trainer.ranks import StepMeasurement, measured, sample_lengths


def main(argv: Sequence[str]) -> int:
    """Measure and show what ``argv`` asks for; returns the exit code."""
    asked = _parser().parse_args(argv)
    need(asked.device)
    if asked.replay and asked.ranks > 1:
        raise SystemExit("error: --replay: with one rank only")
    if asked.replay and "num_experts" not in SHAPES[asked.model]:
        raise SystemExit(f"error: --replay: {asked.model} has no experts; take a mixture, such as moe-2b")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint: Path = asked.checkpoint or Path(folder) / "hf"
        if not (checkpoint / "model.safetensors").exists():
            write_random(checkpoint, asked.model, device=asked.device)
        asked.save = Path(folder) / "saved"
        asked.save.mkdir()
        found = measured(asked, checkpoint)
    _show(asked, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("trainer", __doc__)
    add_option(parser, "--model", str, "shape of the model, which gets random weights", "1.7b", choices=list(SHAPES))
    add_option(parser, "--device", str, "device of the ranks", "cuda", choices=["cuda", "cpu"])
    add_option(parser, "--ranks", int, "trainer ranks, one GPU each", 1)
    add_option(parser, "--tokens", int, "tokens per microbatch (--max-tokens-per-gpu)", 32_768)
    add_option(parser, "--sample-tokens", int, "tokens per sample, or of the longest one", 4096)
    add_option(parser, "--median-tokens", int, "median of log-normal lengths; without it, all samples are equally long")
    add_option(parser, "--microbatches", int, "microbatches per step and data-parallel rank", 2)
    add_option(parser, "--steps", int, "training steps; the first one does not count", 4)
    add_option(parser, "--checkpoint", Path, "folder to keep the model in, or one that has it")
    add_option(parser, "--deadline-s", float, "seconds for the whole benchmark", 900.0)
    parser.add_argument("--profile", action="store_true", help="table of the kernels that take longest")
    replay_help = "train each batch a second time with routing replay of the trainer's routes; for mixtures"
    parser.add_argument("--replay", action="store_true", help=replay_help)
    add_option(parser, "--saves", int, "checkpoints to write after the steps, one after another", 0)
    impls = get_args(TransformerImpl)
    add_option(parser, "--transformer-impl", str, "implementation of the layers", "auto", choices=impls)
    add_parallel(parser.add_argument_group("layout of the trainer (docs/parallelism.md)"))
    return parser


def _show(asked: argparse.Namespace, found: StepMeasurement) -> None:
    lengths = sample_lengths(asked)
    tokens = sum(lengths)
    config = SHAPES[asked.model]
    attention = 6 * config["num_hidden_layers"] * config["num_attention_heads"] * config["head_dim"]
    flops = tokens * (6 * num_weights(asked.model, active=True) + attention * sum(each**2 for each in lengths) / tokens)
    step_s = min(found.step_s)
    per_gpu = flops / step_s / asked.ranks
    table = Table("what", "figure")
    sizes = {field.name: getattr(asked, field.name) for field in fields(ParallelConfig)}
    split = [f"{name} {value}" for name, value in sizes.items() if value not in (None, 1, ()) and value is not True]
    table.add_row("model", f"{asked.model}, {num_weights(asked.model, active=False) / 1e9:.2f} billion weights")
    table.add_row("ranks", f"{asked.ranks}; {', '.join(split) or 'as it comes'}")
    table.add_row("layers", found.layers)
    table.add_row(
        "tokens per step",
        f"{tokens:,}; {asked.tokens:,} per microbatch, {min(lengths):,} to {max(lengths):,} per sample",
    )
    table.add_row("step", f"{step_s:.3f} s, best of {', '.join(f'{each:.3f}' for each in found.step_s)}")
    if found.replay_s:
        extra = median(after / before for before, after in zip(found.step_s, found.replay_s, strict=True)) - 1
        replayed = ", ".join(f"{each:.3f}" for each in found.replay_s)
        table.add_row(
            "step with routing replay", f"{min(found.replay_s):.3f} s, best of {replayed}; median {extra:+.1%}"
        )
    table.add_row("tokens/s", f"{tokens / step_s:,.0f}")
    table.add_row("model FLOP/s per rank", f"{per_gpu / 1e12:.1f} T")
    table.add_row("matrix product FLOP/s", f"{found.matrix_rate / 1e12:.1f} T")
    table.add_row("share", f"{per_gpu / found.matrix_rate:.1%}")
    table.add_row("peak memory", f"{found.memory_gib:.1f} GiB")
    if found.save_s:
        table.add_row("training waits for a checkpoint", _seconds(found.save_s))
        table.add_row("it is written after", _seconds(found.written_s))
        table.add_row("host memory of all ranks, most", f"{found.host_gib:.1f} GiB")
    console = Console(width=150)
    console.print(table)
    if found.kernels:
        console.print(found.kernels, markup=False, highlight=False, soft_wrap=True)


def _seconds(values: Sequence[float]) -> str:
    """Several durations, in their order."""
    return ", ".join(f"{each:.2f}" for each in values) + " s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
