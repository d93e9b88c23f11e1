"""Runs of the quickstart with one fault each, chosen by --seed: what the fault costs, and how the run ends.

    uv run python -m benchmarks.chaos --lives 60                 a campaign; repeated, it continues
    uv run python -m benchmarks.chaos --only kill-gcs --lives 3  one fault at its moments
    uv run python -m benchmarks.chaos --only stop-rank@commit    one fault at one moment
    uv run python -m benchmarks.chaos --share 2/3                every third life, next to processes with the others
    uv run python -m benchmarks.chaos --list                     every fault and moment

Each life starts train_async.py as a user would, on a CPU.  After some steps one fault happens: a process is killed or
stopped, a disk is full, a reward hangs, or a second run starts.  A run that ended is resumed with --load until it has
trained to the end.  Each life is one line in lives.jsonl in --out; table.md has all of them.  Several processes, each
with its --share, play one campaign at once into the same --out.
Exit codes: 0, 1 a life is BROKEN, 2 the options are wrong.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.chaos import disks
from benchmarks.chaos.accounts import BROKEN, Told, summary, table
from benchmarks.chaos.faults import all_faults, life, named, names
from benchmarks.chaos.lives import Play
from benchmarks.common.background_run import leave_in_order
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of

ROWS = "lives.jsonl"


@dataclass(frozen=True, slots=True)
class Share:
    """The share ``number`` of ``count`` shares of a campaign."""

    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> "Share":
        """Return the share "I/N".  Raises ArgumentTypeError."""
        number, _, count = text.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise argparse.ArgumentTypeError(f"must be I/N with I from 1 to N, got {text}")
        return cls(int(number), int(count))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def lives(self, num_lives: int) -> range:
        """Return the numbers of the lives of this share."""
        return range(self.number - 1, num_lives, self.count)


def main(argv: Sequence[str]) -> int:
    """Play the lives that ``argv`` asks for and are not in --out yet; returns the exit code."""
    asked = _parse(argv)
    if asked.list:
        _say("\n".join(sorted(named(fault) for fault in all_faults())))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    done = _done(asked.out)
    for number in asked.share.lives(asked.lives):
        if (number, asked.seed) not in {(row["life"], row["seed"]) for row in done}:
            told = _play(asked, number)
            with (asked.out / ROWS).open("ab", buffering=0) as file:  # one write: other shares add lines as well
                file.write(orjson.dumps(told.as_json()) + b"\n")
            done = _done(asked.out)
            _write(asked, argv, done)
    _say("\n".join(_write(asked, argv, done)))
    return 1 if any(row["verdict"].startswith(BROKEN) for row in done) else 0


def _play(asked: argparse.Namespace, number: int) -> Told:
    drawn, began = life(number, asked.seed, asked.only), time.monotonic()
    folder = asked.out / f"life-{asked.seed}-{number}"
    _clear(folder)  # of a life that was interrupted

    def tell(text: str) -> None:
        _say(f"life {number + 1}/{asked.lives} [{time.monotonic() - began:4.0f} s] {text}")

    tell(named(drawn.fault))
    told = Play(drawn, folder, tell).played()
    tell(told.verdict)
    if not told.is_broken and not asked.keep:
        _clear(folder)
    return told


def _clear(folder: Path) -> None:
    disks.unmount(folder / "disk")
    shutil.rmtree(folder, ignore_errors=True)


def _done(out: Path) -> list[dict[str, Any]]:
    file = out / ROWS
    return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


def _write(asked: argparse.Namespace, argv: Sequence[str], rows: list[dict[str, Any]]) -> list[str]:
    """Write the table of all lives so far, and return its lines."""
    about = circumstances("chaos", argv, asked.commit)
    rows = sorted(rows, key=lambda row: (row["life"], row["seed"]))  # shares end in any order
    notes = [f"- life {row['life']}: {note}" for row in rows for note in row["notes"]]
    lines = [*table(rows), "", summary(rows), "", *notes, *(f"- {name}: {value}" for name, value in about.items())]
    written = asked.out / f"table.md.{os.getpid()}"
    written.write_text("\n".join(lines) + "\n")
    written.replace(asked.out / "table.md")  # other shares write it as well
    return lines


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("chaos", __doc__)
    add_option(parser, "--lives", int, "number of lives of the campaign", 60)
    add_option(parser, "--seed", int, "seed of the order of faults, and of their moments", 0)
    add_option(parser, "--only", str, "kind of fault, fault, or fault@moment (see --list)")
    add_option(parser, "--share", Share.of, "share of the lives to play, as I/N", Share())
    parser.add_argument("--list", action="store_true", help="print every fault and moment, and start nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folders of lives that ended as they should")
    add_option(parser, "--commit", str, "commit to record where there is no git")
    add_option(parser, "--out", Path, "folder for all files", Path("runs/chaos"))
    asked = parser.parse_args(argv)
    asked.out = asked.out.absolute()
    if asked.only is not None and asked.only not in names():
        parser.error(f"--only {asked.only}: no such fault; one of {', '.join(names())}")
    if asked.lives < 1:
        parser.error(f"--lives must be at least 1, got {asked.lives}")
    if not asked.list and os.name != "posix":
        parser.error("needs Linux")
    return asked


if __name__ == "__main__":
    leave_in_order()
    sys.exit(main(sys.argv[1:]))
