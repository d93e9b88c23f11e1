"""The settings of saved batches, with slime's names."""

from pathlib import Path

from asyncrl.config import load_run, missing_batches
from tests.unit.config.runs import complaints, complete, load, problems


def test_saved_batches_of_all_steps_are_trained_again(tmp_path: Path) -> None:
    for step in range(3):
        (tmp_path / f"{step}.batch").touch()
    run = load(tmp_path, "--load-debug-rollout-data", str(tmp_path / "{rollout_id}.batch"), "--debug-train-only")
    assert [run.debug.file_to_load(step).name for step in range(3)] == ["0.batch", "1.batch", "2.batch"]
    assert problems(run) == []


def test_a_missing_batch_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "0.batch").touch()
    flags = ("--load-debug-rollout-data", str(tmp_path / "{rollout_id}.batch"))
    (line,) = complaints(*complete(tmp_path), *flags)
    assert line == (
        f"load-debug-rollout-data: no file {tmp_path / '1.batch'} for step 1; with num-rollout 1 they suffice"
    )
    assert load_run([*complete(tmp_path), *flags, "--num-rollout", "1"]).rollout.num_rollout == 1


def test_a_resumed_run_needs_the_batches_from_its_step_on(tmp_path: Path) -> None:
    (tmp_path / "2.batch").touch()
    flags = ("--load-debug-rollout-data", str(tmp_path / "{rollout_id}.batch"), "--load", str(tmp_path / "saved"))
    run = load(tmp_path, *flags)
    assert missing_batches(run, 2) == []
    assert missing_batches(run, 1) == [f"load-debug-rollout-data: no file {tmp_path / '1.batch'} for step 1"]


def test_training_alone_needs_batches(tmp_path: Path) -> None:
    (line,) = complaints(*complete(tmp_path), "--debug-train-only")
    assert line == "debug-train-only without load-debug-rollout-data: there are no batches to train on"


def test_a_run_does_not_save_what_it_loads(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    flags = ("--load-debug-rollout-data", str(tmp_path / "b"), "--save-debug-rollout-data", "c{rollout_id}")
    (line,) = complaints(*complete(tmp_path), *flags)
    assert "the batches are saved already" in line


def test_batches_are_not_saved_over_each_other(tmp_path: Path) -> None:
    (line,) = complaints(*complete(tmp_path), "--save-debug-rollout-data", "a")
    assert line == "save-debug-rollout-data a is one file for all steps; give it {rollout_id}, the step's number"


def test_other_braces_are_refused(tmp_path: Path) -> None:
    for pattern in ("{step}", "{}", "{rollout_id", "{rollout_id.x}"):
        (line,) = complaints(*complete(tmp_path), "--save-debug-rollout-data", pattern)
        assert "only {rollout_id} may be in braces" in line
