"""Short runs of the quickstart with one planted fault each, and healthy ones: which alarms does each run raise?

    uv run python -m benchmarks.planted_faults --check              all runs
    uv run python -m benchmarks.planted_faults --only stale-engine  one run
    uv run python -m benchmarks.planted_faults --list               every run

Each run starts train_async.py as a user would, on a CPU.  Its files stay in --out, and the same command continues where
it was interrupted: finished runs are read again.  table.md has the alarms of all runs.  With --check, the exit code is
1 unless each fault raises an alarm in its first ten steps, and no healthy run raises any.
Exit codes: 0, 1 a check failed or a run did not end by itself, 2 the options are wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.background_run import leave_in_order
from benchmarks.common.circumstances import ROOT, circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.planted_faults.plans import Plan, plans
from benchmarks.planted_faults.report import Outcome, failures, outcome_of, table, write_rows

RUN_S = 900.0
"""Limit for a run on a busy machine; an idle one needs a minute."""
LATE = 124
"""Exit code of a run that was ended because of this limit."""
FOLDER = "run"
FINISHED = "finished"
"""Name of a file in the folder of a run that ended by itself."""


def main(argv: Sequence[str]) -> int:
    """Start the runs that ``argv`` asks for and are not in --out yet; returns the exit code."""
    asked = _parse(argv)
    if asked.list:
        _say("\n".join(f"{plan.name}: {plan.says}" for plan in plans()))
        return 0
    chosen = [plan for plan in plans() if asked.only in (None, plan.name)]
    outcomes: list[Outcome] = []
    for plan in chosen:
        folder = asked.out / plan.name
        code = 0 if (folder / FINISHED).exists() else _run(plan, folder)
        outcomes.append(outcome_of(plan, folder / FOLDER, code))
        _say(f"{plan.name}: exit code {code}, {len(outcomes[-1].alarms)} alarms")
        _write(asked, argv, outcomes)
    _say("\n".join(_write(asked, argv, outcomes)))
    if asked.rows is not None:
        write_rows(asked.rows, outcomes)
    failed = failures(outcomes)
    _say("\n".join(failed))
    return 1 if any(each.code for each in outcomes) or (asked.check and failed) else 0


def _run(plan: Plan, folder: Path) -> int:
    """Run ``plan`` to its end and return the exit code."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
    folder.mkdir(parents=True)
    words = [sys.executable, "train_async.py", *plan.words(folder), "--run-dir", str(folder / FOLDER)]
    environment = {**os.environ, **plan.environment(folder)}
    with (folder / "output.txt").open("wb") as output:
        try:
            code = subprocess.call(
                words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=RUN_S
            )
        except subprocess.TimeoutExpired:
            _say(f"{plan.name}: not over after {RUN_S:.0f} s, and ended")
            return LATE
    if code == 0:
        (folder / FINISHED).touch()
    return code


def _write(asked: argparse.Namespace, argv: Sequence[str], outcomes: Sequence[Outcome]) -> list[str]:
    """Write the table of all runs so far, and return its lines."""
    about = circumstances("planted_faults", argv, asked.commit)
    lines = [*table(outcomes), "", *(f"- {name}: {value}" for name, value in about.items())]
    (asked.out / "table.md").write_text("\n".join(lines) + "\n")
    return lines


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("planted_faults", __doc__)
    names = [plan.name for plan in plans()]
    add_option(parser, "--only", str, "name of the only run (see --list)", choices=names)
    parser.add_argument("--list", action="store_true", help="print every run, and start nothing")
    parser.add_argument(
        "--check", action="store_true", help="fail if a fault raises no alarm, or a healthy run raises one"
    )
    add_option(parser, "--rows", Path, "file for the numbers of all runs, as JSON with xz")
    add_option(parser, "--commit", str, "commit to record where there is no git")
    add_option(parser, "--out", Path, "folder for all files", Path("runs/planted_faults"))
    asked = parser.parse_args(argv)
    asked.out = asked.out.absolute()
    return asked


if __name__ == "__main__":
    leave_in_order()
    sys.exit(main(sys.argv[1:]))
