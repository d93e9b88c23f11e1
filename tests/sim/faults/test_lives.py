"""Lives of a run in which anything may fail, of fixed seeds."""

import asyncio
import gc
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.sim.faults import __main__ as command
from asyncrl.sim.faults import hunt as hunt_module
from asyncrl.sim.faults import life, planted
from asyncrl.sim.faults.hunt import Findings, hunt, hunt_together, simulating
from asyncrl.sim.faults.life import live
from asyncrl.sim.faults.loop import LifeLoop
from asyncrl.sim.faults.planted import PLANTED, found_by
from asyncrl.sim.faults.shrink import history, shrunk
from asyncrl.sim.faults.world.plan import KINDS, drawn

FIXED = (
    *range(40),
    203,
    210,
    265,
    535,
    10_007_327,
    10_010_206,
    10_017_686,
    20_012_076,
    43_301_179,
    50_262_282,
    50_663_449,
    60_248_821,
    70_013_035,
    90_034_271,
    120_222_666,
)
"""Seeds that every test run lives; some found an error once."""
FOUND_BY = {
    "lost wake-up of admission": 2,
    "prompt settled twice": 5,
    "token repeated after a retry": 12,
    "deadline off by one": 203,
    "version taken at completion": 5,
    "slot kept after an abort": 14,
    "prompt lost at a resume": 0,
    "wasted tokens forgotten": 535,
    "synced after a failed update": 265,
    "group kept that cannot form": 30,
    "group kept after a restart": 38,
    "vanished machine not found": 166,
    "group of a dead trainer kept": 19,
    "checkpoint named too early": 14,
    "trained before it is durable": 0,
    "order of batches forgotten": 32,
    "finished group forgotten": 2,
    "buffered group saved as in flight": 34,
    "last batch forgotten by a restarted trainer": 35,
}
"""For each planted error a seed whose life finds it."""
ORACLES = {
    "lost wake-up of admission": {"progress"},
    "prompt settled twice": {"no prompt is lost", "settled once"},
    "token repeated after a retry": {"tokens without gap or repeat"},
    "deadline off by one": {"deadlines suffice"},
    "version taken at completion": {"version of each token"},
    "slot kept after an abort": {"nothing is left at the end", "progress"},
    "prompt lost at a resume": {"no prompt is lost"},
    "wasted tokens forgotten": {"ledger", "recovered accounts"},
    "synced after a failed update": {"engines serve what was published"},
    "group kept that cannot form": {"no healthy engine is ended"},
    "group kept after a restart": {"no error without a fault"},
    "vanished machine not found": {"no error without a fault"},
    "group of a dead trainer kept": {"no error without a fault"},
    "checkpoint named too early": {"the latest checkpoint is complete"},
    "trained before it is durable": {"trained groups are durable"},
    "order of batches forgotten": {"steps in order"},
    "finished group forgotten": {"ledger"},
    "buffered group saved as in flight": {"recovered accounts", "the journal can be read"},
    "last batch forgotten by a restarted trainer": {"resumed state is the saved state"},
}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with simulating() as folder:
        yield folder


def listed(found: Findings) -> str:
    return "\n".join(f"seed {seed}: {text}" for seed, (_, text) in found.violations.items())


def test_fixed_lives_hold_every_oracle(scratch: Path) -> None:
    found = hunt(FIXED, scratch)
    assert found.num_lives == len(FIXED)
    assert not found.violations, listed(found)
    assert found.num_resumed > 5
    assert 0 < found.num_with_journal < found.num_lives
    assert found.num_recovered > 10
    assert {"done", "killed"} <= found.ends.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_happens(kind: str, scratch: Path) -> None:
    having = (seed for seed in itertools.count() if any(fault.kind == kind for fault in drawn(seed)[1]))
    for seed in itertools.islice(having, 40):
        outcome = live(*drawn(seed), scratch)
        assert outcome.violation is None, f"seed {seed}"
        if outcome.happened[kind]:
            return
    pytest.fail(f"{kind} never happened")


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found(name: str, scratch: Path) -> None:
    seed = FOUND_BY[name]
    found = found_by(name, range(seed, seed + 1), scratch)
    assert {oracle for oracle, _ in found.violations.values()} & ORACLES[name], found.violations
    healthy = hunt([seed], scratch)
    assert not healthy.violations


def test_a_failure_is_shrunk_to_the_faults_that_it_needs(scratch: Path) -> None:
    setting, faults = drawn(FOUND_BY["prompt settled twice"])
    with PLANTED["prompt settled twice"]():
        outcome = live(setting, faults, scratch)
        assert outcome.violation is not None
        left = shrunk(setting, faults, outcome.violation.oracle, scratch)
        assert 0 < len(left) <= len(faults)
        for fault in left:
            fewer = live(setting, [each for each in left if each is not fault], scratch)
            assert fewer.violation is None or fewer.violation.oracle != outcome.violation.oracle
        assert any("FAULT" in line for line in history(setting, left, scratch).lines)


def test_a_killed_life_leaves_no_memory(scratch: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # as the command has it: asyncio warns of the loop that it creates
        asyncio.set_event_loop_policy(None)  # and creates one only where no policy was told of a loop
        seeds = [seed for seed in range(3000, 3010) if "killed" in live(*drawn(seed), scratch).ends]
        gc.collect()
    assert len(seeds) > 3
    assert not [each for each in gc.get_objects() if isinstance(each, LifeLoop)]


def test_a_life_is_the_same_in_every_process() -> None:
    words = [sys.executable, "-m", "asyncrl.sim.faults", "--seed", "11", "--trace"]
    traces = [
        subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": salt})
        for salt in ("1", "2")
    ]
    assert traces[0].stdout == traces[1].stdout
    assert "train step" in traces[0].stdout


def test_the_times_of_a_trace_rise(scratch: Path) -> None:
    outcome = live(*drawn(3034), scratch, is_traced=True)
    times = [float(line.split()[0]) for line in outcome.lines]
    assert outcome.num_processes > 1
    assert times == sorted(times)


def test_the_command_shows_the_seed_of_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--lives", "3", "--seed", "0"]) == 0
    with PLANTED["lost wake-up of admission"]():
        assert command.main(["--lives", "3", "--seed", "0"]) == 1
    said = capsys.readouterr().out
    assert "seed 2: progress" in said
    assert "faults that happened" in said


def test_a_bug_between_two_processes_is_a_violation(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(folder: Path) -> Path:
        raise KeyError(folder.name)

    monkeypatch.setattr(life, "latest", buggy)
    found = hunt(range(2), scratch)
    assert found.violations == dict.fromkeys(range(2), ("no bug", "no bug: between two processes: KeyError: 'save'"))


def test_the_command_reports_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt_module, "MOST_AT_ONCE", 1)
    assert command.main(["--lives", "4", "--seed", "0"]) == 0
    reports = [line for line in capsys.readouterr().out.splitlines() if " a second (" in line]
    assert [line.split(" ", 1)[0] for line in reports] == ["1", "4"]


def test_the_command_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--lives", "1000", "--seed", "0", "--seconds", "0"]) == 0
    assert "100 lives" in capsys.readouterr().out


def test_workers_live_the_same_lives(scratch: Path) -> None:
    together = hunt_together(range(6), 2, lambda found, seconds: None)
    alone = hunt(range(6), scratch)
    assert (together.num_lives, together.happened, together.ends) == (6, alone.happened, alone.ends)


def test_workers_find_the_same_planted_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def table(num_workers: int) -> str:
        command.main(["--planted", "--lives", "2", "--seed", "5", "--workers", f"{num_workers}"])
        return capsys.readouterr().out

    monkeypatch.setattr(planted, "MOST_AT_ONCE", 1)
    alone = table(1)
    monkeypatch.setattr(planted, "hunt", None)  # this process lives no life
    assert table(2) == alone
    assert "| prompt settled twice | 1 of 2 | 1 |" in alone
