import os
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.page.sample_index import segments, tables
from asyncrl.page.sample_index.index import Progress, SampleIndex
from asyncrl.page.sample_index.step_files import read_samples
from asyncrl.page.sample_index.versions import between, by_lag
from asyncrl.rollout_log.files import file_of
from benchmarks.page.made_up_run import RunShape, write_run, write_step

WAIT_S = 90.0


def complete(index: SampleIndex, monkeypatch: pytest.MonkeyPatch | None = None) -> Progress:
    """Bring ``index`` to the state of the files."""
    if monkeypatch is not None:
        monkeypatch.setattr("asyncrl.page.sample_index.index.LOOK_S", 0.0)
    progress = index.refresh(WAIT_S)
    assert progress.is_complete
    return progress


def numbers(index: SampleIndex, sql: str = "SELECT * FROM samples ORDER BY step, group_id, sample") -> list[Any]:
    return index.cursor().execute(sql).fetchall()


def no_reading(*_: Any) -> Any:
    raise AssertionError("a file of a step was read")


def test_a_row_of_the_index_is_that_of_the_file(tmp_path: Path) -> None:
    write_run(tmp_path, range(3))
    index = SampleIndex(tmp_path)
    assert complete(index).num_indexed == 3
    [group] = numbers(index, "SELECT DISTINCT group_id FROM samples WHERE step = 2 ORDER BY 1 LIMIT 1")
    columns = ("tokens", "logprobs", "trainer_logprobs", "loss_mask", "reward", "response", "lag")
    [row] = read_samples(tmp_path, 2, group[0], columns, 1)
    sql = (
        "SELECT response_tokens, trained_tokens, reward, lag, response, logprob_diff FROM samples "
        f"WHERE step = 2 AND group_id = {group[0]} AND sample = 1"
    )
    [(length, trained, reward, lag, response, diff)] = numbers(index, sql)
    assert (length, trained) == (len(row["tokens"]), sum(row["loss_mask"]))
    assert (reward, lag, response) == (row["reward"], row["lag"], row["response"][: tables.PREVIEW])
    pairs = zip(row["logprobs"], row["trainer_logprobs"], strict=True)
    assert diff == pytest.approx(sum(abs(engine - trainer) for engine, trainer in pairs) / length, rel=1e-5)


def test_log_probs_that_are_unknown_or_skipped_are_left_out(tmp_path: Path) -> None:
    write_step(tmp_path, 0, RunShape(is_skipped=True))
    table = pq.read_table(write_step(tmp_path, 1))
    place = table.schema.get_field_index("logprobs")
    lists = [[float("nan"), *row[1:]] for row in table["logprobs"].to_pylist()]
    pq.write_table(
        table.set_column(place, table.schema.field(place), pa.array(lists, table.schema.field(place).type)),
        file_of(tmp_path, 1),
    )
    index = SampleIndex(tmp_path)
    complete(index)
    assert numbers(index, "SELECT count(logprob_diff) FROM samples WHERE step = 0") == [(0,)]
    [(diff,)] = numbers(index, "SELECT max(logprob_diff) FROM samples WHERE step = 1")
    assert 0 < diff < 0.1


def test_versions_have_the_trained_tokens_of_their_spans(tmp_path: Path) -> None:
    write_run(tmp_path, range(6), RunShape(max_lag=2))
    index = SampleIndex(tmp_path)
    complete(index)
    [(whole,)] = numbers(index, "SELECT sum(trained_tokens) FROM samples WHERE step = 5")
    shares = between(index.cursor(), 5, 5)
    assert [(share.version, share.lag) for share in shares] == [(3, 2), (4, 1)]
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert sum(share.tokens for share in by_lag(index.cursor(), 100) if share.step == 5) == whole
    assert {share.step for share in by_lag(index.cursor(), 3)} == {0, 2, 4}


def test_the_cache_is_read_instead_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(195, 205))
    first = SampleIndex(tmp_path)
    complete(first)
    assert sorted(path.name for path in (tmp_path / "page").glob("*.parquet")) == [
        "samples-000000.parquet",
        "samples-000200.parquet",
    ]
    assert (tmp_path / "page").stat().st_mode & 0o077 == 0
    monkeypatch.setattr("asyncrl.page.sample_index.index.read_columns", no_reading)
    second = SampleIndex(tmp_path)
    assert complete(second).num_indexed == 10
    assert numbers(second) == numbers(first)
    versions = "SELECT * FROM versions ORDER BY ALL"
    assert numbers(second, versions) == numbers(first, versions)


def test_steps_written_again_new_and_removed_ones_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(4))
    index = SampleIndex(tmp_path)
    complete(index)
    before = numbers(index, "SELECT step, response FROM samples ORDER BY step, group_id, sample")
    write_step(tmp_path, 1, seed=7)
    os.utime(file_of(tmp_path, 1), ns=(1, 1))
    write_step(tmp_path, 4)
    file_of(tmp_path, 3).unlink()
    for again in (index, SampleIndex(tmp_path)):  # the second has a cache of the earlier files
        assert complete(again, monkeypatch).num_indexed == 4
        after = numbers(again, "SELECT step, response FROM samples ORDER BY step, group_id, sample")
        assert {step for step, _ in after} == {0, 1, 2, 4}
        assert [row for row in after if row[0] in (0, 2)] == [row for row in before if row[0] in (0, 2)]
        assert [row for row in after if row[0] == 1] != [row for row in before if row[0] == 1]
        assert len(after) == 4 * 16


def test_steps_after_the_last_one_of_a_resumed_run_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, range(5))
    index = SampleIndex(tmp_path)
    assert complete(index).num_indexed == 5
    monkeypatch.setattr("asyncrl.page.sample_index.index.LOOK_S", 0.0)
    progress = index.refresh(WAIT_S, last_step=2)
    assert (progress.num_indexed, progress.num_files, progress.is_complete) == (3, 3, True)
    assert index.steps() == [0, 1, 2]
    assert numbers(index, "SELECT max(step) FROM samples") == numbers(index, "SELECT max(step) FROM versions") == [(2,)]
    assert index.refresh(WAIT_S, last_step=3).num_indexed == 4


def test_torn_and_foreign_files_are_named_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, range(3))
    torn = file_of(tmp_path, 1)
    torn.write_bytes(torn.read_bytes()[:-100])
    file_of(tmp_path, 9).write_bytes(file_of(tmp_path, 0).read_bytes())
    pq.write_table(pa.table({"step": [8]}), file_of(tmp_path, 8))
    (tmp_path / "rollouts" / "notes.txt").write_text("mine")
    (tmp_path / "rollouts" / ".step-000007.parquet.partial").write_text("being written")
    index = SampleIndex(tmp_path)
    progress = complete(index)
    assert progress.num_indexed == progress.num_files == 2
    problems = "\n".join(progress.problems)
    assert f"{torn} cannot be read" in problems
    assert f"{file_of(tmp_path, 9)} is no file of step 9" in problems
    assert f"{file_of(tmp_path, 8)} is no file of samples: it has no column step of int32" in problems
    assert "notes.txt is no file of a step" in problems
    assert len(progress.problems) == 4
    monkeypatch.setattr("asyncrl.page.sample_index.index.read_columns", no_reading)
    assert complete(index, monkeypatch) == progress, "skipped files are not read again"


@pytest.mark.parametrize("damage", ["torn", "older", "empty", "columns"])
def test_a_cache_that_cannot_be_used_is_replaced(tmp_path: Path, damage: str) -> None:
    write_run(tmp_path, range(3))
    first = SampleIndex(tmp_path)
    complete(first)
    path = tmp_path / "page" / "samples-000000.parquet"
    table = pq.read_table(path)
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-50])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "older":
        entry = orjson.loads(table.schema.metadata[b"asyncrl"]) | {"format": segments.FORMAT - 1}
        pq.write_table(table.replace_schema_metadata({b"asyncrl": orjson.dumps(entry)}), path)
    else:
        pq.write_table(table.drop_columns(["reward"]), path)
    second = SampleIndex(tmp_path)
    assert complete(second).num_indexed == 3
    assert numbers(second) == numbers(first)
    assert pq.read_table(path).equals(table)


def test_a_folder_that_cannot_be_written_is_served_from_memory(tmp_path: Path) -> None:
    write_run(tmp_path, range(3))
    (tmp_path / "page").write_text("in the way")
    index = SampleIndex(tmp_path)
    progress = complete(index)
    assert progress.num_indexed == 3
    assert str(tmp_path / "page") in progress.in_memory
    assert len(numbers(index)) == 3 * 16


def test_a_run_without_samples_is_complete(tmp_path: Path) -> None:
    progress = complete(SampleIndex(tmp_path))
    assert (progress.num_indexed, progress.num_files, list(progress.problems)) == (0, 0, [])


def test_a_folder_that_cannot_be_listed_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("no folder")
    progress = SampleIndex(tmp_path).refresh(WAIT_S)
    assert progress.is_complete
    assert "NotADirectoryError" in progress.problems[0]


def test_one_page_writes_the_cache_at_a_time(tmp_path: Path) -> None:
    write_run(tmp_path, range(2))
    (tmp_path / "page").mkdir()
    with segments.alone(tmp_path / "page"):
        index = SampleIndex(tmp_path)
        assert complete(index).in_memory == "", "the index is written later"
        assert not list((tmp_path / "page").glob("*.parquet"))
