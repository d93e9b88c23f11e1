from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.buffer.journal import (
    Admitted,
    Filtered,
    Left,
    Record,
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.buffer.journal.segments import segment_of
from asyncrl.journal.__main__ import main
from asyncrl.types import GroupId, JsonValue
from tests.unit.buffer.journal.disks import write
from tests.unit.buffer.journal.made import finished, held, place

STATE: dict[str, JsonValue] = {
    "groups": {"admitted": 12, "trained": 10, "filtered": 2, "stale": 0, "failed": 0},
    "tokens": {"trained": 900, "masked": 100, "filtered": 50, "stale": 7, "failed": 0},
}


def admitted(group_id: int) -> Admitted:
    return Admitted(group_id=GroupId(group_id), place=place(group_id), prompts_taken=group_id, last_taken=None)


RECORDS: tuple[Record, ...] = (
    Snapshot(step=5, state=STATE, held=()),
    *map(admitted, range(8)),
    *(finished(each, tokens=10) for each in range(5)),
    finished(4, tokens=20),
    Taken(step=5, group_ids=(GroupId(0), GroupId(1))),
    Trained(step=5, is_skipped=False),
    Taken(step=6, group_ids=(GroupId(2),)),
    Trained(step=6, is_skipped=True),
    Snapshot(step=7, state=STATE, held=()),
    Filtered(group_id=GroupId(5), reason="all right", num_tokens=11, num_observed=0),
    Left(group_id=GroupId(6), outcome="stale", num_tokens=13, returns_prompt=True),
    Wasted(num_tokens=3),
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write(tmp_path / "journal", RECORDS)
    return tmp_path


def test_segments_are_listed_with_the_counts_of_their_records(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "segment-000001.journal  0.0 MB  run 1, snapshot of step 5: 1 snapshot, 8 admitted, 6 fin"
    )
    assert lines[1].startswith(
        "segment-000002.journal  0.0 MB  run 1, snapshot of step 7: 1 snapshot, 1 filtered, 1 left"
    )
    assert lines[2].startswith(
        "2 segments  0.0 MB: 2 snapshot, 8 admitted, 6 finished, 1 filtered, 1 left, 1 wasted, 2 t"
    )
    assert lines[3] == "every checksum is right"
    assert main([str(run_dir / "journal")]) == 0


def test_damage_is_one_line_with_file_and_byte(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segment_of(run_dir / "journal", 1).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for words in ([], ["--account", "6"], ["--export", str(run_dir / "a.parquet")]):
        assert main([str(run_dir), *words]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}, byte ")
    assert not (run_dir / "a.parquet").exists()


def test_a_folder_without_a_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main([str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {folder} has no journal")


def test_a_run_directory_names_the_folder_of_its_journal(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path_factory.mktemp("run")
    (run / "notes.toml").write_text("not TOML")
    (run / "sums.toml").write_text(f'save = "{run_dir}"\n')
    assert main([str(run), "--account", "6"]) == 0
    assert capsys.readouterr().out.startswith("after 6 steps")


def test_a_run_without_a_journal_is_told_where_it_would_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sums.toml").write_text("lr = 1e-6\n")
    assert main([str(tmp_path)]) == 2
    text = "it is in the folder of --save: give that folder"
    assert capsys.readouterr().err == f"error: {tmp_path} has no journal; {text}\n"
    (tmp_path / "sums.toml").write_text('save = "/nowhere/sums"\n')
    assert main([str(tmp_path)]) == 2
    text = "nor has the folder of --save in its settings: /nowhere/sums"
    assert capsys.readouterr().err == f"error: {tmp_path} has no journal, {text}\n"


def test_a_folder_behind_the_flag_of_a_number_is_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--account", str(run_dir)])
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith(
            f"error: argument --account: STEP must be a number, got {run_dir}; give a folder in front of the flag: "
            f"{run_dir} --account"
        )
    )


def rows(text: str) -> dict[str, list[str]]:
    return {line[:11].strip(): line[11:].split() for line in text.splitlines()[2:10]}


def test_the_account_at_a_step_has_the_groups_and_tokens_until_then(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir), "--account", "6"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "after 6 steps, 1 of them taken since the snapshot of step 5"
    found = rows(text)
    assert found["trained"] == ["10", "2", "1,000", "40"]
    assert found["buffered"] == ["-", "3", "-", "80"]
    assert found["in flight"] == ["-", "3", "-", "-"]
    assert found["admitted"] == ["12", "8", "-", "-"]


def test_the_account_at_the_end_begins_with_the_last_snapshot(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir), "--account"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "after 7 steps, 0 of them taken since the snapshot of step 7"
    found = rows(text)
    assert found["filtered"] == ["2", "1", "50", "11"]
    assert found["stale"] == ["0", "1", "7", "16"]
    assert text.splitlines()[-1] == "5 tokens delivered in all, 3 of them late since the snapshot"


def test_a_skipped_step_counts_as_failed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment_of(run_dir / "journal", 2).path.unlink()
    assert main([str(run_dir), "--account"]) == 0
    assert rows(capsys.readouterr().out)["failed"] == ["0", "1", "0", "20"]


@pytest.mark.parametrize(
    ("step", "text"), [("3", "has no snapshot of step 3 or before"), ("9", "ends after step 7, before step 9")]
)
def test_a_step_that_the_journal_does_not_have_is_one_line(
    step: str, text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir), "--account", step]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_a_journal_without_a_snapshot_has_no_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [Wasted(num_tokens=1)])
    assert main([str(tmp_path), "--account"]) == 2
    assert capsys.readouterr().err == "error: the journal has no snapshot\n"


def test_finished_groups_are_exported_with_the_step_that_took_them(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "groups.parquet"
    assert main([str(run_dir), "--export", str(file)]) == 0
    assert capsys.readouterr().out == f"5 groups in {file}\n"
    found = pq.read_table(file).to_pylist()
    assert [(row["group_id"], row["step"], len(row["tokens"])) for row in found] == [
        *((group_id, 5, 10) for group_id in (0, 0, 1, 1)),
        *((2, 6, 10),) * 2,
        *((3, None, 10),) * 2,
        *((4, None, 20),) * 2,
    ]
    assert found[0]["lag"] == 5
    assert found[-1]["lag"] is None
    assert found[0]["reward"] == 1.0


def exported(run_dir: Path) -> dict[int, int | None]:
    """Return the step of each group that the command exports."""
    file = run_dir / "groups.parquet"
    assert main([str(run_dir), "--export", str(file)]) == 0
    return {row["group_id"]: row["step"] for row in pq.read_table(file).to_pylist()}


def test_a_step_is_known_by_a_snapshot_after_its_segment_was_deleted(tmp_path: Path) -> None:
    waiting = tuple(held(each, is_buffered=True) for each in (1, 2))
    taken = Taken(step=5, group_ids=(GroupId(1), GroupId(2)))
    records: list[Record] = [
        Snapshot(step=0, state={}, held=()),
        *map(finished, (1, 2)),
        Snapshot(step=5, state={}, held=waiting),
        taken,
        Snapshot(step=5, state={}, held=waiting, pending=(taken,)),  # the run was killed, and resumed
        Trained(step=5, is_skipped=False),
    ]
    write(tmp_path / "journal", records)
    assert exported(tmp_path) == {1: 5, 2: 5}
    segment_of(tmp_path / "journal", 2).path.unlink()
    assert exported(tmp_path) == {1: 5, 2: 5}


def test_a_group_that_left_in_a_deleted_segment_is_not_exported(tmp_path: Path) -> None:
    records: list[Record] = [
        Snapshot(step=0, state={}, held=()),
        *map(finished, (1, 2)),
        Snapshot(step=5, state={}, held=tuple(held(each, is_buffered=True) for each in (1, 2))),
        Taken(step=5, group_ids=(GroupId(1),)),
        Trained(step=5, is_skipped=False),
        Snapshot(step=6, state={}, held=(held(2, is_buffered=True),)),
    ]
    write(tmp_path / "journal", records)
    assert exported(tmp_path) == {1: 5, 2: None}
    segment_of(tmp_path / "journal", 2).path.unlink()
    assert exported(tmp_path) == {2: None}


@pytest.mark.parametrize(("staleness", "mask", "lag"), [("5", 1, 5), ("4", 0, None), (None, 1, 5)])
def test_tokens_that_were_too_old_for_their_step_are_masked(
    staleness: str | None, mask: int, lag: int | None, tmp_path: Path
) -> None:
    about: dict[str, JsonValue] = {} if staleness is None else {"about": {"max-staleness": staleness}}
    taken = Taken(step=5, group_ids=(GroupId(1),))
    write(tmp_path / "journal", [Snapshot(step=5, state=about, held=()), finished(1, tokens=3), finished(2), taken])
    file = tmp_path / "groups.parquet"
    assert main([str(tmp_path), "--export", str(file)]) == 0
    found = pq.read_table(file).to_pylist()
    assert [(row["loss_mask"], row["lag"]) for row in found if row["step"] == 5] == [([mask] * 3, lag)] * 2
    assert all(sum(row["loss_mask"]) > 0 for row in found if row["step"] is None), "no step took them yet"


def test_an_account_counts_the_last_content_of_a_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = RECORDS[0]
    assert isinstance(first, Snapshot)
    write(tmp_path, [replace(first, state={}), finished(0, tokens=1), finished(0, tokens=2)])
    assert main([str(tmp_path), "--account"]) == 0
    assert rows(capsys.readouterr().out)["buffered"] == ["-", "1", "-", "4"]
