"""Benchmarks that need a GPU end in one line on a machine without one."""

import importlib

import pytest
import torch

REHEARSED = ["configs/qwen3-4b.sh", "--config", "tests/launch/models/qwen3-4b/config.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
@pytest.mark.parametrize(
    ("name", "words"),
    [("trainer", []), ("weight_update", []), ("lost_engine", []), ("sync_vs_async", []), ("rehearse", REHEARSED)],
)
def test_without_a_gpu_a_benchmark_ends_in_one_line(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}.__main__").main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no GPU here: give --device cpu and a small model\n"
