"""The mismatch of engines and trainer in each arrangement, as a table in Markdown."""

from collections.abc import Sequence
from math import fsum

from benchmarks.sync_vs_async.figures import ArrangementRun, Results

COLUMNS = {
    "mismatch/logprob_mean": "log-prob diff: mean",
    "mismatch/logprob_p99": "99th percentile",
    "mismatch/logprob_max": "largest",
    "mismatch/k3": "k3",
    "train/routes_differ": "routes that differ",
    "train/routes_missing": "routes missing",
}
"""Metrics of a step (docs/metrics.md), and their columns."""


def mismatch_table(results: Results) -> list[str]:
    """The lines of the table, one row per arrangement; none if no step has such a metric."""
    found = {name: mismatch(runs) for name, runs in results.by_arrangement.items()}
    if not any(found.values()):
        return []
    lines = ["", "| arrangement | " + " | ".join(COLUMNS.values()) + " |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for name, numbers in found.items():
        cells = [f"{numbers[metric]:.2e}" if metric in numbers else "" for metric in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def mismatch(runs: Sequence[ArrangementRun]) -> dict[str, float]:
    """Means of the metrics over the measured steps that have them, weighted by trained tokens; the largest of maxima.

    The mean of 99th percentiles is not the percentile of all tokens.
    """
    steps = [
        (row, figures.trained)
        for run in runs
        for row, figures in zip(run.rows[len(run.rows) - len(run.steps) :], run.steps, strict=False)
    ]
    numbers = dict[str, float]()
    for metric in COLUMNS:
        values = [(row[metric], weight) for row, weight in steps if metric in row and weight]
        if not values:
            continue
        if metric.endswith("_max"):
            numbers[metric] = max(value for value, _ in values)
        else:
            numbers[metric] = fsum(value * weight for value, weight in values) / fsum(weight for _, weight in values)
    return numbers
