"""The start and the memory of a stream of prompts, for files of several sizes.

    uv run python -m benchmarks.data                          2 MB and 2 GB
    uv run python -m benchmarks.data --megabytes 2 20000      2 MB and 20 GB
    uv run python -m benchmarks.data --check                  exit code 1 outside of the limits

Writes JSONL files of made-up rows of about 1 kB, one after the other, and deletes each after its measurement.  Each is
streamed by a fresh process, which takes prompts as fast as they come.  Prints one row per file: the seconds to open
the stream and to start the workers, the seconds of reading until the first batch, the resident memory of the process
that takes the prompts, after the first batch and at most, and the prompts per second.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.data.measure import Measurement, Setup
from benchmarks.data.rows import write_rows, write_tokenizer

FIRST_BATCH_S = 2.0
"""Limit of the time to the first batch."""
MORE_MEMORY_MB = 200.0
"""Limit of the memory above that of the smallest file."""


def main(argv: Sequence[str]) -> int:
    """Measure each size and return the exit code."""
    asked = _parser().parse_args(argv)
    found: dict[int, Measurement] = {}
    for megabytes in asked.megabytes:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            path = Path(folder) / "rows.jsonl"
            write_rows(path, megabytes * 10**6)
            write_tokenizer(Path(folder))
            found[megabytes] = _measured(asked, path, asked.hf_checkpoint or Path(folder))
    console = Console(width=140)
    console.print(table(found))
    for name, value in circumstances("data", argv).items():
        console.print(f"{name}: {value}", highlight=False)
    lines = problems(found)
    for line in lines:
        console.print(line, highlight=False)
    return 1 if asked.check and lines else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("data", __doc__)
    sizes = "sizes of the files in MB, the smallest first (default: 2 2000)"
    parser.add_argument("--megabytes", type=int, nargs="+", default=[2, 2000], metavar="N", help=sizes)
    add_option(parser, "--prompts", int, "number of prompts to take from each file", 20_000)
    add_option(parser, "--batch", int, "number of prompts of the first batch", 128)
    add_option(parser, "--workers", int, "number of data workers", 2)
    add_option(parser, "--hf-checkpoint", Path, "folder with a tokenizer (default: one made from the rows)")
    add_option(parser, "--folder", Path, "folder for the files (default: the system's temporary folder)")
    parser.add_argument("--shuffle", action="store_true", help="shuffle the prompts")
    parser.add_argument("--check", action="store_true", help="fail outside of the limits")
    return parser


def _measured(asked: argparse.Namespace, path: Path, checkpoint: Path) -> Measurement:
    """Measure in a fresh process, whose memory no earlier file has used."""
    setup = Setup(
        path=str(path),
        checkpoint=str(checkpoint),
        shuffle=asked.shuffle,
        workers=asked.workers,
        prompts=asked.prompts,
        batch=asked.batch,
    )
    command = [sys.executable, "-m", "benchmarks.data.measure", orjson.dumps(asdict(setup)).decode()]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return Measurement(**orjson.loads(ended.stdout))


def table(found: dict[int, Measurement]) -> Table:
    """Return one row per file."""
    rows = Table("file", "open s", "start s", "first batch s", "MB then", "MB at most", "prompts/s")
    for megabytes, each in found.items():
        rows.add_row(
            f"{megabytes} MB",
            f"{each.open_s:.2f}",
            f"{each.start_s:.2f}",
            f"{each.first_batch_s:.2f}",
            f"{each.first_mb:.0f}",
            f"{each.most_mb:.0f}",
            f"{each.prompts_per_s:.0f}",
        )
    return rows


def problems(found: dict[int, Measurement]) -> list[str]:
    """Return one line for each figure outside of the limits."""
    least = next(iter(found.values())).most_mb
    lines = []
    for megabytes, each in found.items():
        if each.first_batch_s > FIRST_BATCH_S:
            lines.append(
                f"{megabytes} MB: the first batch took {each.first_batch_s:.2f} s, more than {FIRST_BATCH_S:g}"
            )
        if each.most_mb - least > MORE_MEMORY_MB:
            lines.append(f"{megabytes} MB: {each.most_mb - least:.0f} MB more memory, more than {MORE_MEMORY_MB:g}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
