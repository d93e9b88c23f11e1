"""The cost of the files with a run's samples is measured on files that are written."""

import asyncio

from benchmarks.rollout_files.__main__ import Cost, Lag, made_batch, made_report, measured, problems


def test_a_small_step_has_plausible_figures() -> None:
    batch = made_batch(16, 100)
    idle, writing, cost = asyncio.run(measured(batch, made_report(batch), 3, idle_s=0.1))
    assert 0.0 < idle.p50_ms <= idle.p99_ms <= idle.max_ms
    assert writing.seconds > 0.0
    assert 5.0 < cost.bytes_per_token < 40.0
    assert cost.cpu_s > 0.0 and cost.loop_us > 0.0


def test_figures_outside_of_the_limits_are_named() -> None:
    good = Lag(p50_ms=0.1, p99_ms=1.0, max_ms=20.0, starved=0.0, seconds=1.0)
    bad = Lag(p50_ms=0.1, p99_ms=30.0, max_ms=40.0, starved=0.0, seconds=1.0)
    assert problems(good, Cost(loop_us=1.0, cpu_s=0.2, file_s=0.2, bytes_per_token=10.0)) == []
    assert problems(bad, Cost(loop_us=150.0, cpu_s=0.2, file_s=0.2, bytes_per_token=10.0)) == [
        "the lag is 30.0 ms at the 99th percentile, more than 5",
        "a sample takes 150 us of the event loop, more than 100",
    ]
