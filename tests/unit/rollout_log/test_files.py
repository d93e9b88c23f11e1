import json
import logging
import re
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.pipeline.run import skipped
from asyncrl.rollout_log import files as rollout_files
from asyncrl.rollout_log.files import MOST_WAITING, ROLLOUTS_FOLDER, RolloutFiles, file_of, rows_of
from asyncrl.types import Batch, GroupId, TrainReport
from tests.unit.metrics.made import batch, group, scored

DOCUMENT = Path(__file__).parents[3] / "docs" / "rollouts.md"
LENGTHS = (4, 3, 2, 6)
"""Tokens of the samples of ``made.batch``."""


def trained() -> TrainReport:
    """The report of a step, whose numbers are those of their places."""
    rows = tuple(tuple(place + token / 8 for token in range(length)) for place, length in enumerate(LENGTHS))
    return replace(skipped(1.0), is_skipped=False, logprobs=rows, advantages=tuple((1.0,) * each for each in LENGTHS))


def written(folder: Path, step: Batch, report: TrainReport, share: float = 1.0) -> list[dict[str, Any]]:
    files = RolloutFiles(folder, share)
    files.write(step, report)
    files.close()
    return list(pq.read_table(file_of(folder, step.step)).to_pylist())


def test_a_file_has_every_sample_of_a_step(tmp_path: Path) -> None:
    rows = written(tmp_path, batch(), trained())
    assert [(row["step"], row["group_id"], row["sample"]) for row in rows] == [
        (5, 0, 0),
        (5, 0, 1),
        (5, 1, 0),
        (5, 1, 1),
    ]
    second = rows[1]
    assert second["prompt"] == "1+1="
    assert json.loads(second["label"]) == "2"
    assert second["tokens"] == [7, 7, 7]
    assert second["logprobs"] == [-0.5] * 3
    assert second["trainer_logprobs"] == [1.0, 1.125, 1.25]
    assert second["advantages"] == [1.0] * 3
    assert second["loss_mask"] == [1, 1, 0]
    assert second["reward"] == 0.0
    assert second["lag"] == 1
    assert second["finish"] == "length"
    assert [(each["step"], each["start"], each["stop"]) for each in second["spans"]] == [(4, 0, 1), (5, 1, 3)]
    assert rows[2]["lag"] is None, "no token is in the loss"


def test_long_lists_and_many_rows_are_converted_in_parts(tmp_path: Path) -> None:
    lengths = (0, 20_000, 3, *[1] * 200, 8192, *[1500] * 3, 2048, 2049, 5, 0)
    samples = [replace(scored(0, 1.0, (1,) * each, (0, 0, each)), loss_mask=(1,) * each) for each in lengths]
    step = Batch(step=0, groups=tuple(group(number, each) for number, each in enumerate(samples)))
    told = tuple(array("f", [number % 97 + place for number in range(each)]) for place, each in enumerate(lengths))
    rows = written(tmp_path, step, replace(skipped(1.0), logprobs=told, advantages=tuple(map(tuple, told))))
    assert [row["trainer_logprobs"] for row in rows] == [each.tolist() for each in told]
    assert [row["advantages"] for row in rows] == [each.tolist() for each in told]
    assert [len(row["tokens"]) for row in rows] == list(lengths)
    assert [row["group_id"] for row in rows] == list(range(len(lengths)))


def test_a_small_step_is_written_as_a_large_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = written(tmp_path / "small", batch(), trained())
    skipped_small = written(tmp_path / "skipped small", batch(), skipped(1.0))
    monkeypatch.setattr(rollout_files, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(rollout_files, "_FEW_TOKENS", 0)
    assert written(tmp_path / "large", batch(), trained()) == small
    assert written(tmp_path / "skipped large", batch(), skipped(1.0)) == skipped_small


def test_a_skipped_step_has_no_numbers_of_the_trainer(tmp_path: Path) -> None:
    rows = written(tmp_path, batch(), skipped(1.0))
    assert [(row["trainer_logprobs"], row["advantages"]) for row in rows] == [(None, None)] * 4
    assert rows[3]["tokens"] == [7] * 6


def test_whatever_users_leave_as_metadata_is_written(tmp_path: Path) -> None:
    made, metadata = batch(), dict[Any, Any]({"set": {1, 2}, 3: "three"})
    strange = replace(made.groups[0].prompt, metadata=metadata, label=["a", 1.5])
    rows = written(
        tmp_path, replace(made, groups=(replace(made.groups[0], prompt=strange), *made.groups[1:])), trained()
    )
    assert json.loads(rows[0]["metadata"]) == {"set": "{1, 2}", "3": "three"}
    assert json.loads(rows[0]["label"]) == ["a", 1.5]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_is_one_of_whole_groups(share: float) -> None:
    groups = tuple(
        group(number, scored(0, 1.0, (1,), (0, 0, 1)), scored(1, 0.0, (1,), (0, 0, 1))) for number in range(400)
    )
    rows = list(rows_of(Batch(step=0, groups=groups), skipped(1.0), share))
    chosen = {row["group_id"] for row in rows}
    assert len(rows) == 2 * len(chosen)
    assert len(chosen) == pytest.approx(400 * share, abs=3)


def test_every_step_has_at_least_one_group() -> None:
    groups = tuple(replace(each, group_id=GroupId(1 + each.group_id)) for each in batch().groups)
    assert {row["group_id"] for row in rows_of(replace(batch(), groups=groups), trained(), 1e-9)} == {1}


def test_an_unusable_folder_costs_files_and_two_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / ROLLOUTS_FOLDER
    blocked.write_text("in the way")
    files = RolloutFiles(tmp_path)
    for step in range(3):
        files.write(batch(step), trained())
        files._thread.submit(int).result()  # noqa: SLF001 (the files before are done)
    blocked.unlink()
    files.write(batch(3), trained())
    files.close()
    first, last = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "step-000000.parquet: not written" in first
    assert "3 steps have no file" in last
    assert [path.name for path in blocked.iterdir()] == ["step-000003.parquet"]


def test_a_disk_that_is_too_slow_costs_files_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    write = rollout_files.write_rows

    def slow(*arguments: Any) -> None:
        goes_on.wait(60.0)
        write(*arguments)

    monkeypatch.setattr(rollout_files, "write_rows", slow)
    monkeypatch.setattr(rollout_files, "MOST_TOKENS", 30)
    files = RolloutFiles(tmp_path)
    for step in range(5):
        files.write(batch(step), trained())
    goes_on.set()
    files.close()
    assert len(list((tmp_path / ROLLOUTS_FOLDER).iterdir())) == MOST_WAITING
    assert "the disk is slower than training" in caplog.text
    assert "3 steps have no file" in caplog.text


def test_many_small_steps_may_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = RolloutFiles(tmp_path)
    for step in range(50):
        files.write(batch(step), trained())
    files.close()
    assert len(list((tmp_path / ROLLOUTS_FOLDER).glob("*.parquet"))) == 50
    assert caplog.text == ""


def test_no_reader_sees_a_file_in_the_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    write = rollout_files.write_rows

    def watched(path: Path, *arguments: Any) -> None:
        write(path, *arguments)
        seen.append([each.name for each in path.parent.glob("*.parquet")])

    monkeypatch.setattr(rollout_files, "write_rows", watched)
    written(tmp_path, batch(), trained())
    assert seen == [[]]


def test_each_column_says_what_it_is() -> None:
    assert all(field.metadata[b"comment"].endswith(b".") for field in rollout_files.schema())


def test_the_documented_columns_are_those_of_the_files() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    short = {"list<element: ": "list<", "item: ": "", "element: ": ""}
    expected = []
    for column in rollout_files.schema():
        kind = str(column.type)
        for long, brief in short.items():
            kind = kind.replace(long, brief)
        expected.append((column.name, kind, column.metadata[b"comment"].decode()))
    assert table == expected


def test_the_documented_query_reads_all_files_at_once(tmp_path: Path) -> None:
    for step in range(3):
        written(tmp_path, batch(step), trained())
    (query,) = re.findall(r'^duckdb -c "(.+)"$', DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    found = duckdb.sql(query.replace("runs/NAME", str(tmp_path)))
    assert found is not None
    assert found.fetchall() == [(step, 0.625, 3.75) for step in range(3)]
