"""Ranks that are killed within an update or hang come back within the run, and nothing is generated again.

The engines live on.  See ``test_synchronous_runs`` for the weights after a restart.
"""

import signal
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import holds
from tests.integration.launcher import FATES, QUICKSTART, RUN_S, START_S, Launched, Outcome
from tests.programs import words_of

STEPS = 12
KILLED_AFTER, STOPPED_AFTER = 3, 6
"""Steps before the kill of a rank, and before another one is stopped."""
SHORT = ("--eval-interval", str(STEPS), "--skip-eval-before-train", "--no-timeline")

pytestmark = pytest.mark.timeout(2700)


def processes(launched: Launched, name: str) -> list[psutil.Process]:
    """The run's processes with ``name`` in their command line."""
    return [process for process in launched.members() if any(name in word for word in words_of(process))]


def engines_of(launched: Launched) -> set[int]:
    """The ids of the processes of the engines."""
    return {each.pid for name in ("sglang.launch_server", "sglang::") for each in processes(launched, name)}


def begun(folder: Path, *flags: str) -> Launched:
    """A run with checkpoints that has trained some steps."""
    folder.mkdir(exist_ok=True)
    launched = Launched(folder / "run", (*flags, *SHORT, "--save", str(folder / "saved")))
    launched.wait_for_steps(KILLED_AFTER, START_S)
    return launched


def ended(launched: Launched, engines: set[int]) -> Outcome:
    """Wait for the end of a run whose trainer was killed, and whose engines are still the same."""
    launched.wait_for_output("trainer restarted: ", START_S)
    with launched.killed_by_a_failure():
        assert engines_of(launched) >= engines, "an engine was restarted"
    return launched.finish(RUN_S)


def check(outcome: Outcome, *, num_steps: int, staleness: int, num_restarts: int) -> None:
    """Check that the run trained every step once, and every token that was generated."""
    assert outcome.code == 0, outcome.output
    assert outcome.left == ()
    assert "Traceback" not in outcome.output
    rows = outcome.rows
    assert [row["step"] for row in rows] == list(range(num_steps))
    for row in rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in FATES)
        assert row["lag/max"] <= staleness
    last = rows[-1]
    assert last["tokens/lost"] == last["tokens/failed"] == last["tokens/stale"] == last["retries"] == 0
    assert last["tokens/held"] == 0
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions))
    assert last["trainer/restarts"] == num_restarts
    assert last["time/without_training_s"] > 0


def test_a_trainer_that_dies_within_an_update_and_one_that_hangs_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in holds.environment(tmp_path / "hold", tmp_path / "saved").items():
        monkeypatch.setenv(name, value)
    flags = ("--max-staleness", "2", "--num-rollout", str(STEPS), "--save-interval", "4", "--control-timeout-s", "15")
    limits = ("--train-timeout-s", "60", "--request-timeout-s", "60", "--actor-num-gpus-per-node", "2")
    launched = begun(tmp_path, *QUICKSTART, *flags, *limits)
    with launched.killed_by_a_failure():
        engines = engines_of(launched)
        holds.arm(tmp_path / "hold", holds.UPDATE)
        launched.wait_until(lambda: holds.is_reached(tmp_path / "hold"), "an update", 60.0)
        processes(launched, "ray::RankActor")[0].kill()
        holds.release(tmp_path / "hold")
    launched.wait_for_output("trainer restarted: ", START_S)
    launched.wait_for_steps(STOPPED_AFTER, START_S)
    with launched.killed_by_a_failure():
        processes(launched, "ray::RankActor")[-1].send_signal(signal.SIGSTOP)
    outcome = ended(launched, engines)
    check(outcome, num_steps=STEPS, staleness=2, num_restarts=2)
