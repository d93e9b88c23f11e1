"""Trainer and engines in turns, on a CPU: all that is done on a GPU, with the real SGLang; only no memory is saved."""

import re
from pathlib import Path

import pytest

from tests.integration.launcher import Outcome, run

STEPS = 4
FLAGS = (
    *("--config", "configs/quickstart.toml", "--num-rollout", str(STEPS), "--eval-interval", "2"),
    *("--n-samples-per-eval-prompt", "1", "--colocate", "--max-staleness", "0", "--save-interval", "2"),
)
TURN = ["trainer", "update", "engines"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("colocated")
    return run(folder / "run", *FLAGS, "--save", str(folder / "checkpoints"))


def test_it_ends_well_and_leaves_no_process(colocated: Outcome) -> None:
    assert colocated.code == 0, colocated.output
    assert colocated.left == ()
    assert (colocated.run_dir / "model" / "model.safetensors").exists()


def test_engines_serve_what_the_trainer_has_after_every_turn(colocated: Outcome) -> None:
    assert [row["step"] for row in colocated.rows] == list(range(STEPS))
    assert all(row["train/logprob_diff"] < 1e-4 for row in colocated.rows)
    assert all(row["lag/max"] == 0 for row in colocated.rows)
    assert [row["version"] for row in colocated.rows] == [1, 2, 3, 4]


def test_turns_come_one_after_the_other(colocated: Outcome) -> None:
    log = (colocated.run_dir / "run.log").read_text()
    first = ["update", "engines"]  # the trainer has the GPUs when it has loaded
    assert re.findall(r"the GPUs pass to the (\w+) in", log) == [*first, *TURN * STEPS, "trainer"]


def test_checkpoints_and_evaluations_have_their_place_in_it(colocated: Outcome) -> None:
    saved = sorted(path.name for path in (colocated.run_dir.parent / "checkpoints").glob("iter_*"))
    assert saved == ["iter_0000002", "iter_0000004"]
    assert [row["eval/step"] for row in colocated.rows if "eval/step" in row] == [0, 2, 4]


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    outcome = run(tmp_path / "run", *FLAGS, "--max-staleness", "1")
    assert outcome.code == 2
    assert "error: colocate with max-staleness 1: engines have no memory while the trainer works" in outcome.output
