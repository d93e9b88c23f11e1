"""The cost of a run's records, with and without them in turn within one run.

    uv run python -m benchmarks.record_cost rollouts                      files of samples, quickstart
    uv run python -m benchmarks.record_cost journal --config configs/quickstart_moe.toml
    uv run python -m benchmarks.record_cost journal --show OUT            the table of an earlier run

Blocks of steps have the records in turn.  A pair is a block with them and the one after it; the first steps of each
block, which began under the other's rule, are left out.  The table has trained tokens per second of both kinds, and the
mean of the pairs' ratios with its standard error.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.common.background_run import BackgroundRun
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.record_cost.program import PATCHES, is_with

FROZEN_LR = "1e-12"
"""Learning rate of --frozen: its steps change no weight of bfloat16 or float32 by more than rounding."""
LEFT_OUT = 2
"""First steps of a block that are not measured."""
FIRST_BLOCKS = 2
"""Blocks at the start that are not measured: imports, and the warm-up of caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Trained tokens per second with and without records."""

    tokens_per_s_with: float
    tokens_per_s_without: float
    ratio: float
    """Mean over pairs of blocks of the one by the other."""
    error: float
    """Standard error of ``ratio``."""
    num_pairs: int


def cost_of(rows: Sequence[Mapping[str, Any]], block: int) -> Cost:
    """Return the cost from the rows of a run.  Raises ValueError with fewer than two pairs."""
    rates: list[tuple[float, float]] = []  # tokens and seconds of each block
    trained = [0, *(row["tokens/trained"] for row in rows)]
    for first in range(FIRST_BLOCKS * block, len(rows) - block + 1, block):
        steps = range(first + LEFT_OUT, first + block)
        tokens = trained[steps.stop] - trained[steps.start]
        rates.append((tokens, sum(rows[step]["time/step_s"] for step in steps)))
    assert is_with(FIRST_BLOCKS * block, block), "a pair begins with records"
    pairs = [(one, other) for one, other in zip(rates[::2], rates[1::2], strict=False)]
    if len(pairs) < 2:
        raise ValueError(f"{len(rows)} steps are {len(pairs)} pairs of blocks of {block}; two are needed")
    ratios = [(one[0] / one[1]) / (other[0] / other[1]) for one, other in pairs]
    return Cost(
        tokens_per_s_with=sum(one[0] for one, _ in pairs) / sum(one[1] for one, _ in pairs),
        tokens_per_s_without=sum(other[0] for _, other in pairs) / sum(other[1] for _, other in pairs),
        ratio=statistics.fmean(ratios),
        error=statistics.stdev(ratios) / len(ratios) ** 0.5,
        num_pairs=len(pairs),
    )


def measured(asked: argparse.Namespace, out: Path) -> Path:
    """Run for the wanted steps, and return the file of rows."""
    out.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "benchmarks.record_cost.program", asked.subject, str(asked.block)]
    longer = str(2 * asked.steps)  # the last step waits for a checkpoint and an evaluation
    flags = ["--config", asked.config, "--num-rollout", longer, "--save", str(out / "saved")]
    flags += ["--eval-interval", longer, "--skip-eval-before-train", *(("--lr", FROZEN_LR) if asked.frozen else ())]
    with BackgroundRun([*program, *flags, *asked.flags], out, asked.deadline_s, {}) as run:
        run.wait(f"{asked.steps} steps", lambda: len(run.rows()) >= asked.steps)
    return run.folder / "metrics.jsonl"


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, and return the exit code."""
    parser = parser_of("record_cost", __doc__)
    parser.add_argument("subject", choices=sorted(PATCHES), help="what is written in turn")
    add_option(parser, "--config", str, "file of the run", "configs/quickstart.toml")
    add_option(parser, "--steps", int, "training steps", 400)
    add_option(parser, "--block", int, "steps of a block", 10)
    add_option(parser, "--deadline-s", float, "seconds until the run is given up", 1800.0)
    add_option(parser, "--out", Path, "folder for the run; by default one that is deleted")
    add_option(parser, "--show", Path, "folder of an earlier run, whose table is printed")
    parser.add_argument(
        "--frozen", action="store_true", help=f"a learning rate of {FROZEN_LR}, so that answers keep their length"
    )
    parser.add_argument("flags", nargs="*", help="further flags of the run, behind --")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        out = asked.show or asked.out or Path(folder)
        file = out / "run" / "metrics.jsonl" if asked.show else measured(asked, out)
        rows = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    show(asked, cost_of(rows, asked.block), argv)
    return 0


def show(asked: argparse.Namespace, cost: Cost, argv: Sequence[str]) -> None:
    """Print the table and the circumstances."""
    console = Console(width=160)
    table = Table("", "trained tokens per s with", "without", "ratio", "standard error", "pairs")
    table.add_row(
        f"{asked.subject}, {Path(asked.config).stem}",
        f"{cost.tokens_per_s_with:,.1f}",
        f"{cost.tokens_per_s_without:,.1f}",
        f"{cost.ratio:.4f}",
        f"{cost.error:.4f}",
        str(cost.num_pairs),
    )
    console.print(table)
    console.print_json(orjson.dumps(circumstances("record_cost", argv)).decode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
