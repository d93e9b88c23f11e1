"""The cost of the journal is measured on a journal that is written and recovered."""

import asyncio
from dataclasses import replace
from pathlib import Path

from benchmarks.journal.__main__ import measured, problems
from benchmarks.rollout_files.__main__ import made_batch


def test_a_small_journal_has_plausible_figures(tmp_path: Path) -> None:
    figures = asyncio.run(measured(tmp_path, made_batch(16, 200).groups, rate=16_000, seconds=0.5, millions=0.05))
    assert 0.0 < figures.paced.p50_ms <= figures.paced.p99_ms <= figures.paced.max_ms
    assert figures.paced.num_tokens == 8_000
    assert figures.fast.num_tokens == 49_600
    assert figures.fast.cpu_ms_per_million > 0.0 and figures.append_us > 0.0
    assert figures.paced_commits_s
    assert 8.0 < figures.bytes_per_token < 10.0
    assert figures.recovery_s > 0.0


def test_figures_outside_of_the_limits_are_named(tmp_path: Path) -> None:
    figures = asyncio.run(measured(tmp_path, made_batch(16, 200).groups, rate=16_000, seconds=0.5, millions=0.05))
    slow = replace(figures.paced, p99_ms=30.0)
    good = replace(figures, paced=replace(slow, p99_ms=1.0), fast=replace(figures.fast, cpu_s=0.0))
    assert problems(good) == []
    bad = replace(good, paced=slow, bytes_per_token=12.0)
    assert problems(bad) == [
        "lag at the 99th percentile, ms: 30.0, more than 2",
        "bytes per token without texts: 12.0, more than 9",
    ]
