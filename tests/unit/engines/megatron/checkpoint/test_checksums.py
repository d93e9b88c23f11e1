"""Files that changed after they were written are found, with a line that names them."""

import shutil
from pathlib import Path

import orjson
import pytest

from asyncrl.config import CheckpointConfig
from asyncrl.engines.megatron.checkpoint.checksums import Checksums, check_files, checksum
from asyncrl.engines.megatron.checkpoint.directory import find_origin
from asyncrl.engines.megatron.checkpoint.writes import Target, commit
from asyncrl.errors import CheckpointFailed, ConfigError
from tests.save_targets import claim
from tests.unit.engines.megatron.checkpoint.test_directory import written
from tests.unit.engines.megatron.checkpoint.test_writes import SHARD, filled, notes


def complete(root: Path, step: int = 10) -> Path:
    made = Target(claim=claim(root), step=step)
    commit(made, notes("A"), filled(made, b"weights"))
    return made.folder


def test_a_complete_checkpoint_passes(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    check_files(folder)
    listed = orjson.loads((folder / "checksums.json").read_bytes())
    assert listed["kind"] == "xxh3_64"
    assert sorted(listed["files"]) == [".metadata", SHARD, "metadata.json", "run.json"]
    assert listed["files"][SHARD]["bytes"] == 7


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        (SHARD, b"weight", "is torn: it has 6 bytes of 7"),
        (SHARD, None, "is missing: 7 bytes of it were written"),
        (".metadata", b"[]", "was changed after it was written: its checksum differs"),
        ("checksums.json", b"{", "is torn or not a list of checksums"),
    ],
)
def test_a_torn_file_is_one_line_that_names_the_checkpoint_before(
    tmp_path: Path, name: str, content: bytes | None, line: str
) -> None:
    written(tmp_path, 5)
    folder = complete(tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        find_origin(CheckpointConfig(load=tmp_path), None)
    assert str(error.value).startswith(f"load: {folder / name} {line}")
    assert str(error.value).endswith("; the checkpoint before is that of --ckpt-step 5")
    assert find_origin(CheckpointConfig(load=tmp_path, ckpt_step=5), None) is not None
    with pytest.raises(ConfigError) as error:
        find_origin(CheckpointConfig(), tmp_path)
    assert str(error.value).startswith(f"ref-load: {folder / name} {line}")
    assert str(error.value).endswith(f"; the checkpoint before is {tmp_path / 'iter_0000005'}")


@pytest.mark.parametrize("left", ["iter_0000007.deleted", "iter_0000007.9f31c0de.partial", "iter_0000007.outdated"])
def test_what_a_run_left_is_not_named_as_the_checkpoint_before(tmp_path: Path, left: str) -> None:
    shutil.copytree(written(tmp_path, 5), tmp_path / left)
    (complete(tmp_path) / SHARD).unlink()
    for checkpoint, ref_load, named in (
        (CheckpointConfig(load=tmp_path), None, "that of --ckpt-step 5"),
        (CheckpointConfig(), tmp_path, str(tmp_path / "iter_0000005")),
    ):
        with pytest.raises(ConfigError) as error:
            find_origin(checkpoint, ref_load)
        assert str(error.value).endswith(f"; the checkpoint before is {named}")


def test_a_checkpoint_without_checksums_passes(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    (folder / "checksums.json").unlink()
    (folder / SHARD).write_bytes(b"")
    Checksums(folder).check(SHARD, 0, 7, "other")
    assert find_origin(CheckpointConfig(load=tmp_path), None) is not None


def test_checksums_of_a_later_kind_are_not_compared(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    (folder / "checksums.json").write_bytes(b'{"kind": "blake4", "files": []}')
    assert find_origin(CheckpointConfig(load=tmp_path), None) is not None


def test_a_part_that_changed_is_found(tmp_path: Path) -> None:
    recorded, summed = Checksums(complete(tmp_path)), checksum()
    summed.update(b"weights")
    recorded.check(SHARD, 0, 7, summed.hexdigest())
    with pytest.raises(CheckpointFailed, match=r"__0_0.distcp is damaged: its 7 bytes from 0 have another checksum"):
        recorded.check(SHARD, 0, 7, "00")
