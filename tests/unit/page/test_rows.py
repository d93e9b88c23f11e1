from pathlib import Path

import orjson
import pytest

from asyncrl.page.runs.rows import Rows
from tests.unit.page.made_runs import row, write_run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", 3) / "metrics.jsonl"


def appended(path: Path, *rows: object) -> None:
    with path.open("ab") as file:
        for each in rows:
            file.write(each if isinstance(each, bytes) else orjson.dumps(each) + b"\n")


def test_numbers_are_columns_over_steps(path: Path) -> None:
    rows = Rows(path)
    assert rows.update()
    assert rows.steps() == [0, 1, 2]
    assert rows.points("tokens/trained") == ([0, 1, 2], [1000.0, 2000.0, 3000.0])
    assert rows.last("reward/mean") == pytest.approx(0.22)
    assert rows.at(1)["lag/max"] == 1
    assert "time/step_s" in rows.names()


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "metrics.jsonl")
    assert not rows.update()
    assert rows.steps() == []
    assert rows.last("reward/mean") is None


def test_only_what_was_appended_is_read(path: Path) -> None:
    rows = Rows(path)
    rows.update()
    assert not rows.update()
    appended(path, row(3))
    assert rows.update()
    assert rows.steps() == [0, 1, 2, 3]


def test_a_row_that_is_being_written_is_left_for_later(path: Path) -> None:
    rows, whole = Rows(path), orjson.dumps(row(3)) + b"\n"
    appended(path, whole[:40])
    rows.update()
    assert rows.steps() == [0, 1, 2]
    appended(path, whole[40:])
    rows.update()
    assert rows.steps() == [0, 1, 2, 3]
    assert rows.num_torn == 0


def test_a_line_that_is_no_row_is_counted(path: Path) -> None:
    appended(path, b"{torn\n", b"[1]\n", row(3))
    rows = Rows(path)
    rows.update()
    assert rows.num_torn == 2
    assert rows.steps() == [0, 1, 2, 3]


def test_a_step_that_was_trained_again_has_the_later_numbers_alone(path: Path) -> None:
    appended(path, row(1, eval__accuracy=0.5), row(1, reward__mean=0.9))
    rows = Rows(path)
    rows.update()
    assert rows.at(1)["reward/mean"] == 0.9
    assert "eval/accuracy" not in rows.at(1)


def test_a_resumed_run_replaces_all_steps_from_its_first_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 8, my__broken=1.0) / "metrics.jsonl"
    appended(path, {"step": 7, "eval/accuracy": 0.5})
    rows = Rows(path)
    rows.update()
    assert rows.last_step is None
    appended(path, row(5, reward__mean=0.9))
    rows.update()
    assert rows.steps() == [0, 1, 2, 3, 4, 5]
    assert rows.last("reward/mean") == 0.9
    assert rows.last("my/broken") == 1.0
    assert rows.last_step == 5
    assert "eval/accuracy" not in rows.names()
    appended(path, row(6, reward__mean=0.8), row(0, reward__mean=0.1))
    rows.update()
    assert rows.points("reward/mean") == ([0], [0.1])
    assert "my/broken" not in rows.names()


def test_a_resumed_run_replaces_later_steps_although_its_first_one_has_no_row(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[2])  # the row of step 1 was lost on a full disk
    appended(path, row(1, reward__mean=0.9))
    rows = Rows(path)
    rows.update()
    assert rows.points("reward/mean") == ([0, 1], [0.2, 0.9])


def test_a_late_row_with_an_evaluation_alone_replaces_no_step(path: Path) -> None:
    appended(path, {"step": 1, "eval/accuracy": 0.7}, {"step": 3, "eval/accuracy": 0.8}, row(3))
    rows = Rows(path)
    rows.update()
    assert rows.points("reward/mean")[0] == [0, 1, 2, 3]
    assert rows.points("eval/accuracy") == ([1, 3], [0.7, 0.8])


def test_a_row_with_an_evaluation_alone_adds_to_its_step(path: Path) -> None:
    appended(path, {"step": 2, "eval/accuracy": 0.7})
    rows = Rows(path)
    rows.update()
    assert rows.at(2)["eval/accuracy"] == 0.7
    assert rows.at(2)["reward/mean"] == pytest.approx(0.22)


def test_a_number_that_is_not_finite_has_no_point(path: Path) -> None:
    appended(path, {**row(3), "train/loss": None})
    rows = Rows(path)
    rows.update()
    assert rows.points("train/loss") == ([], [])


def test_a_file_that_was_replaced_is_read_again(path: Path) -> None:
    rows = Rows(path)
    rows.update()
    path.unlink()
    appended(path, row(0, reward__mean=0.5))
    assert rows.update()
    assert rows.points("reward/mean") == ([0], [0.5])
