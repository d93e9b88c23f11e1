from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest

from asyncrl.config import CheckpointConfig
from asyncrl.engines.megatron.checkpoint.directory import (
    Origin,
    check_model,
    check_save,
    find_origin,
    is_complete,
    latest,
    notes_of,
    read_notes,
)
from asyncrl.engines.megatron.checkpoint.writes import commit, open_partial
from asyncrl.errors import ConfigError
from asyncrl.models.shape import read_shape
from tests.save_targets import target

SHAPE = read_shape(Path(__file__).parents[5] / "configs" / "quickstart" / "model")


def written(root: Path, step: int, notes: bytes = b'{"model": {}, "run": {}}') -> Path:
    """A complete checkpoint without tensors."""
    made = target(root, step)
    open_partial(made)
    for name in (".metadata", "metadata.json"):
        (made.partial / name).write_text("{}")
    commit(made, notes, {})
    return made.folder


def hugging_face(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "no") is None
    written(tmp_path, 5)
    newest = written(tmp_path, 10)
    assert latest(tmp_path) == newest == tmp_path / "iter_0000010"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"


def test_a_tracker_that_names_nothing_is_one_line(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("ten")
    with pytest.raises(ConfigError, match=r"contains 'ten', neither the number of a checkpoint nor 'release'"):
        latest(tmp_path)
    tracker.write_text("10")
    open_partial(target(tmp_path, 10))
    with pytest.raises(ConfigError, match=r"names iter_0000010, which is not there or not complete"):
        latest(tmp_path)
    tracker.unlink()
    tracker.mkdir()
    with pytest.raises(ConfigError, match=r"cannot be read"):
        latest(tmp_path)


def test_the_first_weights_come_from_where_slime_takes_them(tmp_path: Path) -> None:
    reference, saved = hugging_face(tmp_path / "reference"), tmp_path / "saved"
    going_on = CheckpointConfig(load=saved)
    assert find_origin(CheckpointConfig(), None) is None
    assert find_origin(going_on, None) is None
    assert find_origin(going_on, reference) == Origin(folder=reference, kind="hugging_face")
    assert find_origin(CheckpointConfig(load=reference), None) == Origin(folder=reference, kind="hugging_face")
    first, newest = written(saved, 5), written(saved, 10)
    assert find_origin(going_on, reference) == Origin(folder=newest, kind="resume", optimizer=True)
    assert find_origin(replace(going_on, load_optim=False), None) == Origin(folder=newest, kind="resume")
    assert find_origin(replace(going_on, ckpt_step=5), None) == Origin(folder=first, kind="resume", optimizer=True)
    assert find_origin(CheckpointConfig(), saved) == Origin(folder=newest, kind="weights")
    assert find_origin(CheckpointConfig(), first) == Origin(folder=first, kind="weights")
    with pytest.raises(ConfigError, match=r"ckpt-step 6: .*iter_0000006 is not there or not complete"):
        find_origin(replace(going_on, ckpt_step=6), None)
    with pytest.raises(ConfigError, match=r"^ref-load .* has neither a checkpoint nor a model in Hugging Face format"):
        find_origin(CheckpointConfig(), tmp_path)


def test_a_single_checkpoint_to_resume_from_is_refused_and_does_not_start_the_run_anew(tmp_path: Path) -> None:
    written(tmp_path, 5)
    single = written(tmp_path, 10)
    for reference in (None, hugging_face(tmp_path / "reference")):
        with pytest.raises(ConfigError) as error:
            find_origin(CheckpointConfig(load=single), reference)
        assert str(error.value) == f"load {single} is a single checkpoint; give load {tmp_path} and ckpt-step 10"
    release = single.rename(tmp_path / "release")
    with pytest.raises(ConfigError, match=rf"give the folder that has it, or ref-load {release} for its weights alone"):
        find_origin(CheckpointConfig(load=release), None)


def test_a_converted_checkpoint_gives_weights_alone(tmp_path: Path) -> None:
    release = written(tmp_path, 5).rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert find_origin(CheckpointConfig(load=tmp_path), None) == Origin(folder=release, kind="weights")


def test_two_runs_do_not_mix_their_checkpoints(tmp_path: Path) -> None:
    save = CheckpointConfig(save=tmp_path)
    check_save(save)
    written(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"has checkpoints of another run: resume with --load"):
        check_save(save)
    check_save(CheckpointConfig(save=tmp_path, load=tmp_path / "x" / ".."))


def test_a_checkpoint_knows_its_model(tmp_path: Path) -> None:
    folder = written(tmp_path, 5, notes_of(SHAPE, {"state": 1}))
    notes = read_notes(folder)
    assert notes is not None
    check_model(folder, notes["model"], SHAPE)
    check_model(folder, notes["model"], replace(SHAPE, dtype="bfloat16"))
    other = replace(SHAPE, num_layers=99, vocab_size=7)
    with pytest.raises(ConfigError) as error:
        check_model(folder, notes["model"], other)
    assert str(error.value) == (
        f"{folder} is of another model than hf-checkpoint: num_layers {SHAPE.num_layers} (here 99), "
        f"vocab_size {SHAPE.vocab_size} (here 7)"
    )


def test_notes_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    assert read_notes(tmp_path) is None
    for text, message in ((b"{", "cannot be read"), (orjson.dumps(asdict(SHAPE)), "has no model or no run")):
        (tmp_path / "run.json").write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            read_notes(tmp_path)


def test_a_folder_that_can_not_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        check_save(CheckpointConfig(save=tmp_path / "file" / "saved"))


def test_a_checkpoint_whose_description_is_empty_is_not_complete(tmp_path: Path) -> None:
    for name in ("metadata.json", ".metadata"):
        (tmp_path / name).write_text("")
    assert not is_complete(tmp_path)


def test_a_run_killed_while_it_replaced_a_checkpoint_has_the_one_before(tmp_path: Path) -> None:
    replaced = tmp_path / "iter_0000020.outdated"
    replaced.mkdir()
    for name in ("metadata.json", ".metadata"):
        (replaced / name).write_text("{}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    open_partial(target(tmp_path, 20))
    assert latest(tmp_path) == replaced
