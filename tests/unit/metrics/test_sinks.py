import subprocess
import sys
from pathlib import Path

import orjson

from asyncrl.metrics.sinks import JsonlSink, TensorBoardSink


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
