"""Runs of the quickstarts that are killed again and again, and the checks that they lose nothing.

    uv run python -m benchmarks.kills --kills 200                 a campaign; repeated, it continues
    uv run python -m benchmarks.kills --only driver --kills 20    kills of one victim
    uv run python -m benchmarks.kills --variant dense-s0          lives of one variant
    uv run python -m benchmarks.kills --share 2/3                 every third life, next to processes with the others

Each life starts train_async.py as a user would, on a CPU, for 24 steps.  Up to five SIGKILLs at random moments meet its
driver, its trainer rank, or the processes of its engines.  A run that ended is resumed with --load until it has trained
to the end.  Its journal, its samples and its metrics are then checked, and compared with a run that nothing killed.
Each life is one line in lives.jsonl in --out; table.md has all of them.
Exit codes: 0, 1 a life is BROKEN, 2 the options are wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from benchmarks.chaos.__main__ import ROWS, Share
from benchmarks.common.background_run import leave_in_order
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.kills.drawn import VARIANTS, VICTIMS, Life, lives, unkilled
from benchmarks.kills.judged import Outcome, judged
from benchmarks.kills.lengths import Comparison, compared
from benchmarks.kills.played import Play, remove
from benchmarks.kills.told import Told, compared_table, summary, table, totals

OUTCOMES = "outcomes"
"""Folder with the outcome of each life."""


def main(argv: Sequence[str]) -> int:
    """Play lives until there are as many kills as ``argv`` asks for; returns the exit code."""
    asked = _parse(argv)
    asked.out.mkdir(parents=True, exist_ok=True)
    variants = tuple(each for each in VARIANTS if asked.variant in (None, each.name))
    drawn = lives(asked.seed, asked.only, variants)
    for life in islice(drawn, asked.share.number - 1, None, asked.share.count):
        rows = _rows(asked.out)
        if sum(len(row["kills"]) for row in rows) >= asked.kills:
            break
        if life.key not in {_key(row) for row in rows}:
            _add(asked, argv, _play(asked, life))
    rows = _rows(asked.out)
    _say("\n".join(_write(asked, argv, rows)))
    return 1 if any(row["verdict"].startswith("BROKEN") for row in rows) else 0


def _key(row: dict[str, Any]) -> tuple[int, int, str | None, str]:
    return row["life"], row["seed"], row["victim"], row["variant"]


def _add(asked: argparse.Namespace, argv: Sequence[str], told: Told) -> None:
    with (asked.out / ROWS).open("ab", buffering=0) as file:  # one write: other shares add lines as well
        file.write(orjson.dumps(told.as_json()) + b"\n")
    _write(asked, argv, _rows(asked.out))


def _rows(out: Path) -> list[dict[str, Any]]:
    file = out / ROWS
    return [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []


# ---- lives


def _play(asked: argparse.Namespace, life: Life) -> Told:
    """Play a life, after the unkilled run of its seed and variant."""
    without = unkilled(life.seed, life.variant)
    reference = Outcome.read(_outcome_file(asked.out, without.name))
    if reference is None:
        _played(asked, without, None)
        reference = Outcome.read(_outcome_file(asked.out, without.name))
    return _played(asked, life, reference)


def _played(asked: argparse.Namespace, life: Life, reference: Outcome | None) -> Told:
    """Play one life in its folder and write its outcome.  Raises SystemExit if an unkilled run is BROKEN."""
    began, folder = time.monotonic(), asked.out / f"{life.name}-{os.getpid()}"
    remove(folder)

    def tell(text: str) -> None:
        _say(f"{life.name} [{time.monotonic() - began:4.0f} s] {text}")

    play = Play(life, folder, tell)
    play.play()
    told, outcome = judged(play, time.monotonic() - began, reference)
    tell(told.verdict)
    if told.is_broken and life.victim is None:
        raise SystemExit(f"error: the run that nothing killed is {told.verdict}; its files are in {folder}")
    outcome.written(_outcome_file(asked.out, life.name))
    if not told.is_broken and not asked.keep:
        remove(folder)
    return told


def _outcome_file(out: Path, name: str) -> Path:
    return out / OUTCOMES / f"{name}.json"


# ---- tables


def _write(asked: argparse.Namespace, argv: Sequence[str], rows: list[dict[str, Any]]) -> list[str]:
    """Write the tables of all lives so far, and return their lines."""
    rows = sorted(rows, key=lambda row: (row["victim"], row["variant"], row["seed"], row["life"]))
    about = circumstances("kills", argv, asked.commit)
    notes = [f"- {row['victim']} {row['life']}: {note}" for row in rows for note in row["notes"]]
    lines = [totals(rows), "", *summary(rows), "", *compared_table(_comparisons(asked.out, rows)), "", *table(rows)]
    lines += ["", *notes, *(f"- {name}: {value}" for name, value in about.items())]
    written = asked.out / f"table.md.{os.getpid()}"
    written.write_text("\n".join(lines) + "\n")
    written.replace(asked.out / "table.md")  # other shares write it as well
    return lines


def _comparisons(out: Path, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, Comparison | None]]:
    """Compare the lengths of the lives of each variant, and of all, with those of the unkilled runs."""
    outcomes = [(row["variant"], *pair) for row in rows if (pair := _pair(out, row)) is not None]
    for name in [*sorted({row["variant"] for row in rows}), "all"]:
        chosen = [each for each in outcomes if name in (each[0], "all")]
        yield name, "all", compared(*pooled(chosen, only_in_flight=False))
        yield name, "in flight at a kill", compared(*pooled(chosen, only_in_flight=True))


def _pair(out: Path, row: dict[str, Any]) -> tuple[str, Outcome, Outcome] | None:
    """Return the outcomes of the unkilled run, with its name, and of a life."""
    variant = next(each for each in VARIANTS if each.name == row["variant"])
    without = unkilled(row["seed"], variant).name
    life = f"{row['victim']}-{row['variant']}-{row['seed']}-{row['life']}"
    found = [Outcome.read(_outcome_file(out, name)) for name in (without, life)]
    return (without, found[0], found[1]) if found[0] is not None and found[1] is not None else None


def pooled(
    outcomes: Iterable[tuple[str, str, Outcome, Outcome]], *, only_in_flight: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the lengths of the groups that lives started, as the unkilled run has them, and as they were trained.

    A group of several lives of one seed and variant is one entry on each side.
    """
    started, trained = dict[tuple[str, str], list[int]](), dict[tuple[str, str], list[int]]()
    for _, name, without, life in outcomes:
        for group_id in map(str, life.in_flight if only_in_flight else life.started):
            started[name, group_id] = without.lengths.get(group_id, [])
            trained.setdefault((name, group_id), []).extend(life.lengths.get(group_id, []))
    return list(started.values()), list(trained.values())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("kills", __doc__)
    add_option(parser, "--kills", int, "number of kills of the campaign", 200)
    add_option(parser, "--only", str, "victim of all kills", choices=VICTIMS)
    add_option(parser, "--variant", str, "variant of all lives", choices=[each.name for each in VARIANTS])
    add_option(parser, "--seed", int, "seed of the runs, and of the moments of kills", 0)
    add_option(parser, "--share", Share.of, "share of the lives to play, as I/N", Share())
    parser.add_argument("--keep", action="store_true", help="keep the folders of lives that ended as they should")
    add_option(parser, "--commit", str, "commit to record where there is no git")
    add_option(parser, "--out", Path, "folder for all files", Path("runs/kills"))
    asked = parser.parse_args(argv)
    asked.out = asked.out.absolute()
    if asked.kills < 1:
        parser.error(f"--kills must be at least 1, got {asked.kills}")
    if os.name != "posix":
        parser.error("needs Linux")
    return asked


if __name__ == "__main__":
    leave_in_order()
    sys.exit(main(sys.argv[1:]))
