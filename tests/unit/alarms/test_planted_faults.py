"""Each fault that was planted in a real run raises its alarm within ten steps; ten healthy runs raise none.

The numbers of the runs were written by ``benchmarks.planted_faults --rows``.
"""

import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.alarms.alarm import Alarm
from asyncrl.alarms.watch import Watch

RUNS: dict[str, dict[str, Any]] = json.loads(
    lzma.decompress((Path(__file__).parent / "data" / "planted_faults.json.xz").read_bytes())
)
WITHIN = 10
ALARMS = {
    "wrong-template": "Reward without variance",
    "stale-engine": "One engine differs",
    "shifted-tokenizer": "Token ids are shifted",
    "constant-reward": "Reward without variance",
    "collapsed-entropy": "Entropy has collapsed",
    "large-learning-rate": "Entropy rises",
}
HEALTHY = sorted(name for name, run in RUNS.items() if not run["is_faulty"])


def alarms_of(name: str) -> Sequence[Alarm]:
    watch = Watch()
    for row in RUNS[name]["rows"]:
        watch.add(int(row["step"]), row)
    return watch.alarms


def test_there_are_six_faults_and_ten_healthy_runs() -> None:
    assert sorted(ALARMS) == sorted(name for name, run in RUNS.items() if run["is_faulty"])
    assert len(HEALTHY) == 10


@pytest.mark.parametrize("name", ALARMS)
def test_a_planted_fault_raises_its_alarm_within_ten_steps(name: str) -> None:
    assert {alarm.title: alarm.since for alarm in alarms_of(name)}[ALARMS[name]] < WITHIN


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_no_alarm(name: str) -> None:
    assert [(alarm.title, alarm.text) for alarm in alarms_of(name)] == []
