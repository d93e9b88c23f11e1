"""Ranks that are killed within an update, hang or lack memory come back within the run; nothing is generated again.

The engines live on.  See ``test_synchronous_runs`` for the weights after a restart.
"""

import signal
from pathlib import Path

import psutil
import pytest

from benchmarks.chaos import holds
from tests.integration.launcher import FATES, QUICKSTART, RUN_S, START_S, Launched, Outcome
from tests.programs import words_of

STEPS = 13
KILLED_AFTER, STOPPED_AFTER, FULL_AFTER = 3, 6, 9
"""Steps before the kill of a rank, before another one is stopped, and before memory runs out."""
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


HUNGRY = """
import pathlib
import torch

FULL = pathlib.Path(__file__).with_name("full")


def loss(logprobs, old_logprobs, advantages, mask, lengths, /):
    if FULL.exists() and FULL.read_text() and torch.distributed.get_rank() == 0:
        FULL.write_text(FULL.read_text()[1:])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return -advantages * torch.exp(logprobs - old_logprobs), {}
"""
"""A loss that runs out of memory once for each letter in a file."""


def test_a_trainer_that_dies_within_an_update_or_hangs_or_lacks_memory_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    for name, value in holds.environment(tmp_path / "hold", tmp_path / "saved").items():
        monkeypatch.setenv(name, value)
    flags = ("--max-staleness", "2", "--num-rollout", str(STEPS), "--save-interval", "4", "--control-timeout-s", "15")
    limits = ("--train-timeout-s", "60", "--request-timeout-s", "300", "--actor-num-gpus-per-node", "2")
    loss = ("--loss-type", "custom_loss", "--custom-loss-function-path", f"{tmp_path}/hungry.py:loss")
    launched = begun(tmp_path, *QUICKSTART, *flags, *limits, *loss)
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
    launched.wait_for_steps(FULL_AFTER, START_S)
    (tmp_path / "full").write_text("xx")  # a first time, and again in smaller microbatches
    outcome = ended(launched, engines)
    check(outcome, num_steps=STEPS, staleness=2, num_restarts=3)
    log = (outcome.run_dir / "run.log").read_text()
    assert "out of memory and starts again with recompute-granularity full, max-tokens-per-gpu 4096; give" in log
