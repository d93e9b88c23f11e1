import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from asyncrl.metrics.appended_file import AppendedFile
from asyncrl.metrics.sinks import JsonlSink, Sink, TensorBoardSink
from tests.full_disks import file_size_limit, on_full_disk


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [orjson.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]


def test_rows_are_readable_after_a_run_that_was_never_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write({"step": 0, "reward/mean": 0.5})
    sink.write({"step": 1, "reward/mean": 0.75})
    assert lines(tmp_path) == [{"step": 0, "reward/mean": 0.5}, {"step": 1, "reward/mean": 0.75}]
    sink.close()


def test_a_resumed_run_appends_to_the_same_file(tmp_path: Path) -> None:
    for step in (0, 1):
        sink = JsonlSink(tmp_path)
        sink.write({"step": step})
        sink.close()
    assert lines(tmp_path) == [{"step": 0}, {"step": 1}]


def test_a_number_that_is_not_finite_leaves_valid_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.write({"step": 0, "train/loss": float("nan")})
    sink.close()
    assert lines(tmp_path) == [{"step": 0, "train/loss": None}]


def test_the_tensorboard_sink_brings_no_framework_with_it(tmp_path: Path) -> None:
    before = set(sys.modules)  # other tests may have brought one themselves
    TensorBoardSink(tmp_path).close()
    assert not {"torch", "tensorflow", "jax"} & (set(sys.modules) - before)


def test_tensorboard_reads_back_what_an_unclosed_run_had_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write({"step": 3, "reward/mean": 0.5})
    sink.write({"step": 4, "reward/mean": 0.75, "eval/accuracy": 0.25, "eval/step": 2})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    sink.close()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.5), (4, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars("eval/accuracy")] == [(2, 0.25)]


def test_a_run_resumed_into_the_same_folder_keeps_both_curves(tmp_path: Path) -> None:
    for step in (0, 1):
        sink = TensorBoardSink(tmp_path)
        sink.write({"step": step, "reward/mean": 0.5})
        sink.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_the_pipeline_imports_no_heavy_module_and_tensorboard_only_its_sink() -> None:
    code = """
import sys
import asyncrl.metrics.facts, asyncrl.metrics.timeline, asyncrl.metrics.loop_lag
assert not {"rich", "tensorboard"} & set(sys.modules), sorted(sys.modules)
import asyncrl.metrics.closing, asyncrl.metrics.logs, asyncrl.metrics.reporter
assert not {"tensorboard", "torch", "ray"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- full disks


def test_a_full_disk_tears_no_row_and_all_rows_follow_once_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(tmp_path)
    with file_size_limit(1000):
        for step in range(50):
            sink.write({"step": step, "reward/mean": 0.123456789})
        assert 0 < len(lines(tmp_path)) < 50
    sink.write({"step": 50})
    sink.close()
    assert [row["step"] for row in lines(tmp_path)] == list(range(51))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert ["not written: File too large" in record.message for record in caplog.records] == [True, False]
    assert caplog.records[1].message.endswith("metrics.jsonl: written again")


def test_rows_that_do_not_fit_into_memory_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = AppendedFile(tmp_path / "file", most_waiting=30)
    with file_size_limit(10):
        for number in range(10):
            file.write(b"record %d\n" % number)
    file.write(b"last\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"record 0\nrecord 1\nrecord 2\nrecord 3\nlast\n"
    assert caplog.records[1].message.endswith("written again; 6 records are missing")


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_a_disk_that_stays_full_raises_nothing(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink: Sink
    if name == "tensorboard":
        (tmp_path / name).touch()  # no folder can be made there
        sink = TensorBoardSink(tmp_path)
    else:
        on_full_disk(tmp_path / name)
        sink = JsonlSink(tmp_path)
    for step in range(3):
        sink.write({"step": step})
    sink.close()
    first, last = (record.message for record in caplog.records)
    assert "; the run continues, and each further record tries again" in first
    assert last.endswith("records were not written")


def test_a_torn_row_of_a_killed_run_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0}\n{"step":1,"rew')
    sink = JsonlSink(tmp_path)
    sink.write({"step": 9999})
    sink.close()
    assert lines(tmp_path) == [{"step": 0}, {"step": 9999}]


def test_a_row_that_lacks_only_its_line_break_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0}\n{"step":1}')
    sink = JsonlSink(tmp_path)
    sink.write({"step": 2})
    sink.close()
    assert lines(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_long_torn_row_is_found(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step":0}\n{"step":1,' + b"x" * 200_000)
    JsonlSink(tmp_path).close()
    assert lines(tmp_path) == [{"step": 0}]
