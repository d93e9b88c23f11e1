"""The alarms of a run directory: rows of all steps, texts of the newest ones, each read once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from asyncrl.page.runs.run_files import METRICS_FILE, RunFiles, open_runs
from asyncrl.page.runs.run_status import StatusFile
from asyncrl.page.tabs import alarms
from asyncrl.page.tabs.alarms import NEWEST, alarms_of
from asyncrl.rollout_log.files import file_of
from tests.unit.page.serving import opened, served


def add_rows(folder: Path, steps: Sequence[int], **numbers: float) -> None:
    with (folder / METRICS_FILE).open("ab") as file:
        for step in steps:
            file.write(orjson.dumps({"step": step, "time/step_s": 1.0, **numbers}) + b"\n")


def add_texts(folder: Path, steps: Sequence[int], text: str) -> None:
    for step in steps:
        path = file_of(folder, step)
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"group_id": [0, 0, 1], "response": [text, f"not {text}", text]}), path)


def read(folder: Path) -> RunFiles:
    (run,) = open_runs([folder])
    return run


def titles(run: RunFiles) -> list[str]:
    run.rows.update()
    return [alarm.title for alarm in alarms_of(run)]


def test_alarms_come_from_rows_and_from_the_texts_of_the_newest_steps(tmp_path: Path) -> None:
    add_rows(tmp_path, range(10), **{"response/truncated": 1.0})
    add_texts(tmp_path, range(10), "again and " * 20)
    run = read(tmp_path)
    run.rows.update()
    found = {alarm.title: alarm.since for alarm in alarms_of(run)}
    assert found == {"Answers do not end": 2, "Repeated text": 10 - NEWEST + 1}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("update-weights-interval = 20", []),
        ("update-weights-interval = 3", ["Weights do not arrive"]),
        ('update-weights-interval = "20"', ["Weights do not arrive"]),
        ("", ["Weights do not arrive"]),
    ],
)
def test_weights_are_expected_at_the_update_interval_of_the_settings(
    tmp_path: Path, settings: str, found: list[str]
) -> None:
    (tmp_path / "sums.toml").write_text(settings)
    add_rows(tmp_path, range(15), **{"version": 0, "samples/slots": 64, "train/skipped": 0})
    assert titles(read(tmp_path)) == found


def test_only_new_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    texts = alarms._texts  # noqa: SLF001

    def counted(path: Path) -> Any:
        files.append(path.name)
        return texts(path)

    monkeypatch.setattr(alarms, "_texts", counted)
    add_rows(tmp_path, range(8))
    add_texts(tmp_path, range(8), "sound")
    run = read(tmp_path)
    assert titles(run) == titles(run) == []
    add_rows(tmp_path, [8, 9])
    add_texts(tmp_path, [8, 9], "\ufffd\ufffd\ufffd")
    assert titles(run) == ["Garbage text"]
    assert files == [file_of(tmp_path, step).name for step in range(4, 10)]


def test_a_resumed_run_that_repeats_steps_is_watched_anew(tmp_path: Path) -> None:
    add_rows(tmp_path, range(6), **{"response/truncated": 1.0})
    run = read(tmp_path)
    assert titles(run) == ["Answers do not end"]
    add_rows(tmp_path, range(2, 6), **{"response/truncated": 0.0})
    assert titles(run) == []


def test_the_newest_step_of_a_running_run_waits_for_its_samples(tmp_path: Path) -> None:
    StatusFile(tmp_path)
    add_rows(tmp_path, range(3))
    add_texts(tmp_path, range(2), "")
    run = read(tmp_path)
    assert titles(run) == ["Empty answers"]
    assert run.parts[alarms.PART].num_steps == 2
    add_texts(tmp_path, [2], "sound")
    titles(run)
    assert run.parts[alarms.PART].num_steps == 3


def test_a_file_that_cannot_be_read_costs_only_its_texts(tmp_path: Path) -> None:
    add_rows(tmp_path, range(5), **{"response/truncated": 1.0})
    add_texts(tmp_path, range(5), "sound")
    file_of(tmp_path, 4).write_bytes(b"PAR1 and no more")
    assert titles(read(tmp_path)) == ["Answers do not end"]


def test_the_overview_shows_alarms_with_their_steps(tmp_path: Path) -> None:
    add_rows(tmp_path, range(5), **{"response/truncated": 1.0, "filter/acceptance": 0.0})
    add_rows(tmp_path, range(5, 8), **{"response/truncated": 0.0, "filter/acceptance": 0.0})

    with served(tmp_path) as url:
        text = opened(url)
    assert "<strong>Answers do not end</strong> from step 2 to 4. 100% of the answers" in text
    assert "<strong>Most groups are filtered</strong> since step 2. The filter keeps 0% of the groups." in text
