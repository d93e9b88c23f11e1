"""The trackers of a run: what they get, what they keep secret, and that W&B offline and trackio hold every metric."""

import json
import math
import sqlite3
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from asyncrl.app.trackers import check_trackers, open_trackers, trackio_options, wandb_options
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.metrics.reporter import Reporter
from asyncrl.metrics.sinks import JsonlSink
from asyncrl.metrics.trackers.sink import TrackerLimits
from tests.unit.config.runs import load
from tests.unit.metrics.made import UPDATE, evaluation, facts

pytestmark = pytest.mark.timeout(540)  # two processes import wandb

KEY = "5ec4e7" * 7
OFFLINE = ("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "proj", "--wandb-key", KEY)
PATIENT = TrackerLimits(finish_s=150.0)
"""Time for the imports on a busy machine."""
BLOCK = 32768
FILE_HEADER, RECORD_HEADER = 7, 7
FULL, FIRST, LAST = 1, 2, 4


def records(run_dir: Path) -> Iterator[Record]:
    """Yield the records of the only offline run below ``run_dir``.

    A ``.wandb`` file is a log of LevelDB's format: blocks of 32 KiB with pieces of records.  A piece begins with a
    checksum (4 bytes), a length (2) and a kind (1).
    """
    (path,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    data, position, record = path.read_bytes(), FILE_HEADER, b""
    assert data.startswith(b":W&B")
    while position + RECORD_HEADER <= len(data):
        if BLOCK - position % BLOCK < RECORD_HEADER:  # too short for a piece: padding
            position += BLOCK - position % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        piece = data[position + RECORD_HEADER : position + RECORD_HEADER + length]
        position += RECORD_HEADER + length
        record = piece if kind in (FULL, FIRST) else record + piece
        if kind in (FULL, LAST):
            yield Record.FromString(record)


def history(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of the run's history, without W&B's metrics, which begin with an underscore."""
    rows = [record.history.item for record in records(run_dir) if record.HasField("history")]
    named = [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in named]


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def reported(run: RunConfig, run_dir: Path) -> None:
    """Report three steps, one of them with an evaluation, to metrics.jsonl and to the trackers of ``run``."""
    trackers = open_trackers(run, run_dir, run_dir / "logs", PATIENT)
    reporter = Reporter([JsonlSink(run_dir), *trackers.sinks])
    reporter.step(facts(0))
    reporter.step(facts(1, evaluated=evaluation(0, gsm8k=0.25, aime=0.5), logprob_diff=math.nan))
    reporter.step(facts(2, update=UPDATE))
    reporter.close()
    assert [sink.num_dropped for sink in trackers.sinks] == [0] * len(trackers.sinks)


def folder(tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return run_dir


def test_the_offline_run_directory_of_wandb_holds_every_metric_of_metrics_jsonl(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    reported(load(tmp_path, *OFFLINE, "--wandb-team", "us", "--wandb-group", "night"), run_dir)
    assert len(rows_of(run_dir)) == 3
    assert [{name: number(value) for name, value in row.items()} for row in history(run_dir)] == rows_of(run_dir)
    axes = {each.metric.name: each.metric.step_metric for each in records(run_dir) if each.HasField("metric")}
    assert axes["eval/aime/accuracy"] == axes["eval/version"] == "eval/step"
    assert axes["reward/mean"] == axes["train/loss"] == "step"
    assert set(axes) == {name for row in rows_of(run_dir) for name in row}
    (log,) = run_dir.glob("wandb/offline-run-*/logs/debug-core.log")
    assert "is shutting down" in log.read_text()  # W&B's process was asked to end, and so had written everything


def test_a_set_whose_name_has_an_asterisk_loses_no_row_and_takes_no_part_in_patterns(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    trackers = open_trackers(load(tmp_path, *OFFLINE), run_dir, run_dir / "logs", PATIENT)
    sent: list[dict[str, float]] = [{"step": 1, "eval/a*b/reward": 0.5}, {"step": 2, "eval/a*": 0.25}]
    for row in sent:
        trackers.sinks[0].write(row)
    trackers.sinks[0].close()
    assert history(run_dir) == sent
    assert [each.metric for each in records(run_dir) if each.HasField("metric") and each.metric.glob_name] == []


def number(value: Any) -> Any:
    """W&B writes NaN, where metrics.jsonl has null."""
    return None if isinstance(value, float) and math.isnan(value) else value


def test_wandb_gets_the_run_s_name_and_settings_and_no_file_has_the_key(tmp_path: Path) -> None:
    run_dir = folder(tmp_path)
    words = ["--wandb-team", "us", "--wandb-group", "night", "--wandb-run-id", "abc"]
    reported(load(tmp_path, *OFFLINE, *words, "--lr", "2e-5", "--sglang-api-key", KEY[::-1]), run_dir)
    (begun,) = (record.run for record in records(run_dir) if record.HasField("run"))
    assert (begun.entity, begun.project, begun.run_id) == ("us", "proj", "abc")
    assert (begun.run_group, begun.display_name) == ("night_abc", "night_abc")
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert (config["lr"], config["prompt_data"]) == (2e-5, [str(tmp_path / "train.jsonl")])
    content = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert len(content) > 1000
    assert KEY.encode() not in content
    assert KEY[::-1].encode() not in content
    assert run_dir / "logs" / "wandb.log" in run_dir.rglob("*")


def test_the_group_may_have_no_suffix(tmp_path: Path) -> None:
    options = wandb_options(load(tmp_path, *OFFLINE, "--disable-wandb-random-suffix"), tmp_path)
    assert options["group"] == options["name"] == "tiny-model"
    with_suffix = wandb_options(load(tmp_path, *OFFLINE), tmp_path)
    assert with_suffix["group"] == f"tiny-model_{with_suffix['id']}"


def test_wandb_writes_into_the_run_directory_or_where_it_is_told(tmp_path: Path) -> None:
    assert wandb_options(load(tmp_path, *OFFLINE), tmp_path / "run")["dir"] == str(tmp_path / "run")
    other = tmp_path / "a" / "b"
    assert wandb_options(load(tmp_path, *OFFLINE, "--wandb-dir", str(other)), tmp_path)["dir"] == str(other)
    assert other.is_dir()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    run = load(tmp_path, *OFFLINE, "--wandb-dir", str(tmp_path / "taken"))
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=r"^wandb-dir .*/taken: File exists; give another path$"):
        open_trackers(run, tmp_path, tmp_path / "logs")


def test_without_a_tracker_and_with_wandb_disabled_nothing_starts(tmp_path: Path) -> None:
    for words in ([], ["--use-wandb", "--wandb-mode", "disabled"]):
        run = load(tmp_path, *words)
        check_trackers(run.trackers)
        assert open_trackers(run, tmp_path, tmp_path / "logs").sinks == ()
    assert not (tmp_path / "logs").exists()


def test_a_missing_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.app.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check_trackers(load(tmp_path, "--use-wandb", "--use-trackio").trackers)
    assert str(error.value).splitlines() == [
        f"use-{name}: the package {name} is not installed; install asyncrl[{name}] (uv sync --extra {name}), or leave "
        f"out use-{name}"
        for name in ("wandb", "trackio")
    ]
    check_trackers(load(tmp_path, "--use-wandb", "--wandb-mode", "disabled").trackers)


def test_trackio_gets_a_name_a_group_and_the_settings(tmp_path: Path) -> None:
    options = trackio_options(load(tmp_path, "--use-trackio", "--trackio-project", "p", "--trackio-space-id", "us/p"))
    assert (options["project"], options["space_id"], options["group"]) == ("p", "us/p", "tiny-model")
    assert options["name"].startswith("tiny-model_")
    assert options["config"]["num_rollout"] == 3
    assert trackio_options(load(tmp_path, "--use-trackio", "--trackio-name", "again"))["name"] == "again"


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is an extra")
def test_trackio_holds_every_metric_of_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run_dir = folder(tmp_path)
    reported(load(tmp_path, "--use-trackio", "--trackio-project", "proj"), run_dir)
    with sqlite3.connect(tmp_path / "trackio" / "proj.db") as base:
        found = [(step, json.loads(values)) for step, values in base.execute("SELECT step, metrics FROM metrics")]
    expected = [(row["step"], name) for row in rows_of(run_dir) for name in row if name[:5] not in ("step", "eval/")]
    held_out = [(row["eval/step"], name) for row in rows_of(run_dir) for name in row if name.startswith("eval/")]
    assert {(step, name) for step, values in found for name in values} == {*expected, *held_out}
    assert [values["reward/mean"] for _, values in found if "reward/mean" in values] == [0.625] * 3
