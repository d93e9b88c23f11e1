"""The cost of a run's records, with and without them in turn within one run.

    uv run python -m benchmarks.record_cost rollouts                      files of samples, quickstart
    uv run python -m benchmarks.record_cost journal --config configs/quickstart_moe.toml -- --max-staleness 0
    uv run python -m benchmarks.record_cost journal --model 0.6b          random weights, two GPUs
    uv run python -m benchmarks.record_cost journal --show OUT            the table of an earlier run

Blocks of steps have the records in turn.  A pair is a block with them and the one after it; the first steps of each
block, which began under the other's rule, are left out.  The table has trained tokens per second of both kinds, and the
geometric mean of the pairs' ratios with its standard error.  Where steps differ much, their noise hides small costs, so
the table has CPU times as well: those of the driver, which writes the records, the share of its extra time in that of
all processes, and the share of the time that its threads spend on records, by their own clocks.  With --model, all
answers have the same length, and steps differ little.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.common.background_run import BackgroundRun
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of, split_at_dashes
from benchmarks.common.endless_run import add_options, command
from benchmarks.common.shapes import SHAPES
from benchmarks.record_cost.program import DRIVER_S, OTHERS_S, PATCHES, RECORDS_S, is_with

FROZEN_LR = "1e-12"
"""Learning rate of --frozen: its steps change no weight of bfloat16 or float32 by more than rounding."""
LEFT_OUT = 2
"""First steps of a block that are not measured."""
FIRST_BLOCKS = 2
"""Blocks at the start that are not measured: imports, and the warm-up of caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tokens and times of the measured steps of a block."""

    tokens: int
    seconds: float
    driver_s: float
    """CPU time of the driver."""
    all_s: float
    """CPU time of all processes of the run."""
    records_s: float
    """CPU time of the driver's threads for records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Trained tokens per second, and CPU time per trained token, with and without records."""

    tokens_per_s_with: float
    tokens_per_s_without: float
    ratio: float
    """Geometric mean over pairs of blocks of the one by the other.

    Where pairs differ by 8 %, the arithmetic mean would be 0.3 % too large, and as much for the inverse.
    """
    error: float
    """Standard error of ``ratio``."""
    driver_us_with: float
    """Microseconds of the driver's CPU time per trained token."""
    driver_us_without: float
    all_us: float
    """Microseconds of the CPU time of all processes per trained token."""
    share: float
    """The part of all CPU time that records take in the driver: the loss of tokens per second if no core is idle."""
    share_error: float
    """Standard error of ``share``."""
    of_threads: float
    """The part of all CPU time, in blocks with records, that the driver's threads spend on records."""
    of_threads_error: float
    """Standard error of ``of_threads``."""
    num_pairs: int


def cost_of(rows: Sequence[Mapping[str, Any]], block: int) -> Cost:
    """Return the cost from the rows of a run.  Raises ValueError with fewer than two pairs."""
    assert is_with(FIRST_BLOCKS * block, block), "a pair begins with records"
    starts = range(FIRST_BLOCKS * block, len(rows) - block + 1, block)
    blocks = [_block(rows, range(first + LEFT_OUT, first + block)) for first in starts]
    pairs = list(zip(blocks[::2], blocks[1::2], strict=False))
    if len(pairs) < 2:
        raise ValueError(f"{len(rows)} steps are {len(pairs)} pairs of blocks of {block}; two are needed")
    with_it, without = (_sum(half) for half in zip(*pairs, strict=True))
    logs = [math.log((one.tokens / one.seconds) / (other.tokens / other.seconds)) for one, other in pairs]
    ratio = math.exp(statistics.fmean(logs))
    all_s = (with_it.all_s + without.all_s) / (with_it.tokens + without.tokens)
    shares = [(one.driver_s / one.tokens - other.driver_s / other.tokens) / all_s for one, other in pairs]
    of_threads = [one.records_s / one.all_s for one, _ in pairs]
    return Cost(
        tokens_per_s_with=with_it.tokens / with_it.seconds,
        tokens_per_s_without=without.tokens / without.seconds,
        ratio=ratio,
        error=ratio * statistics.stdev(logs) / len(logs) ** 0.5,
        driver_us_with=1e6 * with_it.driver_s / with_it.tokens,
        driver_us_without=1e6 * without.driver_s / without.tokens,
        all_us=1e6 * all_s,
        share=statistics.fmean(shares),
        share_error=statistics.stdev(shares) / len(shares) ** 0.5,
        of_threads=statistics.fmean(of_threads),
        of_threads_error=statistics.stdev(of_threads) / len(of_threads) ** 0.5,
        num_pairs=len(pairs),
    )


def _block(rows: Sequence[Mapping[str, Any]], steps: range) -> Block:
    before, last = rows[steps.start - 1], rows[steps.stop - 1]
    driver_s, others_s, records_s = (last[name] - before[name] for name in (DRIVER_S, OTHERS_S, RECORDS_S))
    return Block(
        tokens=last["tokens/trained"] - before["tokens/trained"],
        seconds=sum(rows[step]["time/step_s"] for step in steps),
        driver_s=driver_s,
        all_s=driver_s + others_s,
        records_s=records_s,
    )


def _sum(blocks: Sequence[Block]) -> Block:
    names = [each.name for each in fields(Block)]
    return Block(**{name: sum(getattr(block, name) for block in blocks) for name in names})


def measured(asked: argparse.Namespace, out: Path, further: Sequence[str]) -> Path:
    """Run for the wanted steps, and return the file of rows."""
    out.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "benchmarks.record_cost.program", asked.subject, str(asked.block)]
    longer = str(2 * asked.steps)  # the last step waits for a checkpoint and an evaluation
    if asked.model is None:
        flags = ["--config", asked.config, "--eval-interval", longer, "--skip-eval-before-train"]
    else:
        flags = _random_run(asked, out)
    flags += ["--num-rollout", longer, "--save", str(out / "saved"), *(("--lr", FROZEN_LR) if asked.frozen else ())]
    with BackgroundRun([*program, *flags, *further], out, asked.deadline_s, {}) as run:
        run.wait(f"{asked.steps} steps", lambda: len(run.rows()) >= asked.steps)
    return run.folder / "metrics.jsonl"


def _random_run(asked: argparse.Namespace, out: Path) -> list[str]:
    """Write a model of random weights, and return the flags of its run."""
    parser = parser_of("record_cost", None)
    add_options(parser, "record_cost")
    words = ["--model", asked.model, "--longest", str(asked.longest), "--device", asked.device]
    _, _, *flags = command(parser.parse_args([*words, "--out", str(out.absolute())]), {})
    return flags


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, and return the exit code."""
    parser = parser_of("record_cost", __doc__)
    parser.add_argument("subject", choices=sorted(PATCHES), help="what is written in turn")
    add_option(parser, "--config", str, "file of the run", "configs/quickstart.toml")
    add_option(
        parser, "--model", str, "shape of a model with random weights, instead of --config", choices=sorted(SHAPES)
    )
    add_option(parser, "--longest", int, "tokens of every answer of --model", 512)
    add_option(parser, "--device", str, "device of --model", "cuda", choices=("cuda", "cpu"))
    add_option(parser, "--steps", int, "training steps", 400)
    add_option(parser, "--block", int, "steps of a block", 10)
    add_option(parser, "--deadline-s", float, "seconds until the run is given up", 1800.0)
    add_option(parser, "--out", Path, "folder for the run; by default one that is deleted")
    add_option(parser, "--show", Path, "folder of an earlier run, whose table is printed")
    parser.add_argument(
        "--frozen", action="store_true", help=f"a learning rate of {FROZEN_LR}, so that answers keep their length"
    )
    parser.epilog = "Words behind -- are further flags of the run."
    own, further = split_at_dashes(argv)
    asked = parser.parse_args(own)
    with tempfile.TemporaryDirectory() as folder:
        out = asked.show or asked.out or Path(folder)
        file = out / "run" / "metrics.jsonl" if asked.show else measured(asked, out, further)
        rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    show(asked, cost_of(rows, asked.block), argv)
    return 0


def show(asked: argparse.Namespace, cost: Cost, argv: Sequence[str]) -> None:
    """Print the table and the circumstances."""
    console = Console(width=180)
    table = Table(
        "",
        "tokens/s with",
        "without",
        "ratio",
        "driver's CPU us/token with",
        "without",
        "all CPU us/token",
        "share",
        "threads' share",
        "pairs",
    )
    table.add_row(
        f"{asked.subject}, {asked.model or Path(asked.config).stem}",
        f"{cost.tokens_per_s_with:,.1f}",
        f"{cost.tokens_per_s_without:,.1f}",
        f"{cost.ratio:.4f} ± {cost.error:.4f}",
        f"{cost.driver_us_with:.1f}",
        f"{cost.driver_us_without:.1f}",
        f"{cost.all_us:.1f}",
        f"{cost.share:.2%} ± {cost.share_error:.2%}",
        f"{cost.of_threads:.2%} ± {cost.of_threads_error:.2%}",
        str(cost.num_pairs),
    )
    console.print(table)
    console.print_json(orjson.dumps(circumstances("record_cost", argv)).decode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
