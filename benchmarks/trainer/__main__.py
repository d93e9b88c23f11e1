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
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from asyncrl.config.areas import TransformerImpl
from asyncrl.config.parallel import ParallelConfig
from benchmarks.common.devices import need
from benchmarks.common.parallel_options import add_parallel
from benchmarks.common.shapes import SHAPES, num_weights, write_random
from benchmarks.trainer.ranks import StepMeasurement, measured, num_samples


def main(argv: Sequence[str]) -> int:
    """Measure and show what ``argv`` asks for; the exit code."""
    asked = _parser().parse_args(argv)
    need(asked.device)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_random(Path(folder) / "hf", asked.model, device=asked.device)
        found = measured(asked, checkpoint)
    _show(asked, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


def _show(asked: argparse.Namespace, found: StepMeasurement) -> None:
    tokens = num_samples(asked) * asked.sample_tokens
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
    sys.exit(main(sys.argv[1:]))
