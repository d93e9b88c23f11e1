"""Learning curves of finished runs, in arms that differ in one setting: a table, a picture and a file of numbers.

    uv run python -m benchmarks.curves --arm clipped runs/a1 runs/a2 --arm centered runs/b1 runs/b2 --svg curves.svg

Reads metrics.jsonl of each run directory.  The runs of an arm differ in their seeds alone.  --csv writes the numbers of
each step, and --from-csv reads them in place of run directories.  Exit codes: 0, 2 the options are wrong.
"""

import csv
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.common.command_line import add_option, parser_of
from benchmarks.curves.picture import Arm, Curve, Panel, picture, smoothed

COLUMNS = ("step", "reward/mean", "lag/mean", "lag/max", "eval/step", "eval/accuracy")
"""The metrics that are read; the last two are in some rows only."""
LAST = 10
"""Number of steps at the end over which rewards are averaged."""

Row = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of an arm."""

    arm: str
    name: str
    rows: tuple[Row, ...]

    @property
    def accuracies(self) -> list[tuple[float, float]]:
        """Held-out accuracy by training steps done; an evaluation that is reported twice counts once."""
        return sorted({row["eval/step"]: row["eval/accuracy"] for row in self.rows if "eval/step" in row}.items())

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """Mean reward of the answers that each step trained on."""
        return [(row["step"], row["reward/mean"]) for row in self.rows]

    @property
    def last_reward(self) -> float:
        """Mean reward of the last steps."""
        return fmean(reward for _, reward in self.rewards[-LAST:])

    @property
    def mean_accuracy(self) -> float:
        """Mean held-out accuracy over all evaluations after the first: the area under the curve."""
        return fmean(accuracy for _, accuracy in self.accuracies[1:])


def main(argv: Sequence[str]) -> int:
    """Show the runs that ``argv`` names; returns the exit code."""
    parser = parser_of("curves", __doc__)
    parser.add_argument(
        "--arm", nargs="+", action="append", default=[], help="name of an arm, then its run directories"
    )
    add_option(parser, "--from-csv", Path, "file that --csv wrote")
    add_option(parser, "--svg", Path, "picture to write")
    add_option(parser, "--csv", Path, "file of numbers to write")
    asked = parser.parse_args(argv)
    try:
        runs = [read(arm, Path(folder)) for arm, *folders in asked.arm for folder in folders]
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}; give run directories")
    if asked.from_csv:
        runs += from_csv(asked.from_csv)
    if not runs:
        parser.error("no run is named: give --arm NAME RUN_DIR ... or --from-csv FILE")
    sys.stdout.write("\n".join(table(runs)) + "\n")
    if asked.csv:
        to_csv(runs, asked.csv)
    if asked.svg:
        asked.svg.write_text(picture(panels_of(runs)))
    return 0


def read(arm: str, folder: Path) -> Run:
    """Read the run in ``folder``."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = tuple({name: line[name] for name in COLUMNS if name in line} for line in map(json.loads, lines))
    return Run(arm=arm, name=folder.name, rows=rows)


def to_csv(runs: Iterable[Run], path: Path) -> None:
    """Write one line for each step of each run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("arm", "run", *COLUMNS))
        for run in runs:
            for row in run.rows:
                writer.writerow((run.arm, run.name, *(f"{row[name]:.5g}" if name in row else "" for name in COLUMNS)))


def from_csv(path: Path) -> list[Run]:
    """Read what ``to_csv`` wrote."""
    found: dict[tuple[str, str], list[Row]] = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            row = {name: float(line[name]) for name in COLUMNS if line[name]}
            found.setdefault((line["arm"], line["run"]), []).append(row)
    return [Run(arm=arm, name=name, rows=tuple(rows)) for (arm, name), rows in found.items()]


def table(runs: Sequence[Run]) -> list[str]:
    """Return the lines of a table in Markdown: a line for each run, then one for each arm."""
    lines = [
        "| arm | run | accuracy at the start | at the end | mean after the start "
        f"| reward, last {LAST} steps | lag, mean | lag, max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        lags = fmean(row["lag/mean"] for row in run.rows), max(row["lag/max"] for row in run.rows)
        shown = " | ".join(f"{number:.3f}" for number in (run.accuracies[0][1], *results(run)))
        lines.append(f"| {run.arm} | {run.name} | {shown} | {lags[0]:.1f} | {lags[1]:.0f} |")
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [results(run) for run in runs if run.arm == arm]
        lines.append(f"| {arm} | all {len(mine)} | | {' | '.join(map(spread, zip(*mine, strict=True)))} | | |")
    return lines


def results(run: Run) -> tuple[float, float, float]:
    """Return the figures by which arms are compared."""
    return run.accuracies[-1][1], run.mean_accuracy, run.last_reward


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation as text."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels of the picture."""
    accuracies: dict[str, list[Curve]] = {}
    rewards: dict[str, list[Curve]] = {}
    for run in runs:
        accuracies.setdefault(run.arm, []).append(run.accuracies)
        rewards.setdefault(run.arm, []).append(smoothed(run.rewards))
    titles = {"held-out accuracy": accuracies, "reward in training, mean of five steps": rewards}
    return [
        Panel(title=title, arms=[Arm(name=name, curves=curves) for name, curves in arms.items()])
        for title, arms in titles.items()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
