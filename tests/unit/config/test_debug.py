"""The settings of saved batches, with slime's names."""

from pathlib import Path

import pytest

from asyncrl.config import load_run, missing_batches, resolved
from asyncrl.config.derived import num_ranks
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


def test_generation_alone_has_all_gpus_and_no_bound_on_staleness(tmp_path: Path) -> None:
    flags = "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2"
    run = load(tmp_path, *flags.split(), "--debug-rollout-only")
    assert (run.cluster.num_engines, run.cluster.colocate, num_ranks(run)) == (4, False, 0)
    assert run.rollout.staleness == 2, "the lag of the last of three batches"
    (note,) = run.notes
    assert f"the engines serve {tmp_path / 'tiny-model'} to the end" in note
    again = tmp_path / f"{run.name}.toml"
    again.write_text(resolved(run))
    assert load_run(["--config", str(again)]) == run


@pytest.mark.parametrize(
    "flags",
    [
        "--update-weights-interval 2 --max-staleness 1 --num-rollout 1",
        "--max-staleness 0",
        "--update-weight-transport disk --update-weight-disk-dir {}",
    ],
)
def test_generation_alone_may_be_added_to_any_schedule(flags: str, tmp_path: Path) -> None:
    run = load(tmp_path, *flags.format(tmp_path).split(), "--debug-rollout-only")
    assert run.train.update_weight_disk_dir is None
    assert run.rollout.staleness == run.rollout.num_rollout - 1
    assert problems(run) == [], "the settings that are written to the run directory repeat it"


def test_generation_alone_refuses_what_needs_a_trainer(tmp_path: Path) -> None:
    flags = ("--save", str(tmp_path / "s"), "--load", str(tmp_path / "s"), "--check-fast-step")
    (line,) = complaints(*complete(tmp_path), "--debug-rollout-only", *flags)
    assert (
        line == "debug-rollout-only with save, load, check-fast-step: there is no trainer; leave out one or the other"
    )


def test_a_run_has_either_engines_alone_or_the_trainer_alone(tmp_path: Path) -> None:
    flags = ("--load-debug-rollout-data", "b", "--debug-train-only", "--debug-rollout-only")
    (line,) = complaints(*complete(tmp_path), *flags)
    assert line == (
        "debug-rollout-only with debug-train-only and load-debug-rollout-data: one starts the engines alone, the other "
        "the trainer alone"
    )
