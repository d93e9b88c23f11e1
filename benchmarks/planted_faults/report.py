"""The alarms of finished runs as a table, and what is wrong with them."""

import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.alarms.alarm import Alarm
from asyncrl.alarms.watch import Watch
from asyncrl.page.runs.run_files import open_runs
from asyncrl.page.tabs.alarms import numbers_of
from benchmarks.planted_faults.plans import Plan

WITHIN = 10
"""Steps in which a fault must raise an alarm."""
LEFT_OUT = ("eval/", "mismatch/", "throughput/", "episodes/")
"""Beginnings of numbers that no rule reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that has ended."""

    plan: Plan
    code: int
    rows: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The numbers of each step and of its texts."""

    @property
    def alarms(self) -> Sequence[Alarm]:
        """The alarms, the oldest first."""
        watch = Watch()
        for step, row in self.rows.items():
            watch.add(step, row)
        return watch.alarms

    @property
    def reward(self) -> str:
        """The mean reward of the last step."""
        return f"{list(self.rows.values())[-1]['reward/mean']:.2f}" if self.rows else ""


def outcome_of(plan: Plan, run_dir: Path, code: int) -> Outcome:
    """Read the files of a run; there are none if it could not start."""
    if code:
        return Outcome(plan=plan, code=code)
    (run,) = open_runs([run_dir])
    run.rows.update()
    return Outcome(plan=plan, code=code, rows={step: numbers_of(run, step) for step in run.rows.steps()})


def write_rows(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the numbers of all runs, with four digits; tests apply the rules to them."""
    runs = {
        each.plan.name: {
            "is_faulty": each.plan.is_faulty,
            "rows": [
                {name: float(f"{value:.4g}") for name, value in row.items() if not name.startswith(LEFT_OUT)}
                for row in each.rows.values()
            ],
        }
        for each in outcomes
    }
    file.write_bytes(lzma.compress(json.dumps(runs, separators=(",", ":")).encode(), preset=9))


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = ["| run | | steps | last reward | alarms, with the step of each |", "|---|---|---|---|---|"]
    for each in outcomes:
        alarms = "; ".join(f"{alarm.title} ({alarm.since})" for alarm in each.alarms) or "none"
        lines.append(f"| {each.plan.name} | {each.plan.says} | {len(each.rows)} | {each.reward} | {alarms} |")
    lines.append("")
    lines += [f"- {each.plan.name}, {alarm.title}: {alarm.text}" for each in outcomes for alarm in each.alarms]
    return lines


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each run that does not show what it should."""
    return [line for each in outcomes for line in _failures(each)]


def _failures(outcome: Outcome) -> Iterator[str]:
    name = outcome.plan.name
    if outcome.code:
        yield f"{name}: ended with exit code {outcome.code}"
    if outcome.plan.is_faulty and not any(alarm.since < WITHIN for alarm in outcome.alarms):
        yield f"{name}: no alarm in the first {WITHIN} steps"
    if not outcome.plan.is_faulty and outcome.alarms:
        yield f"{name}: a healthy run has alarms"
