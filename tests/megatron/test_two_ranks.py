"""Data parallelism over gloo, one process per rank."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import rank_process
from safetensors.torch import load_file
from tiny import free_port, write_checkpoint

DEADLINE_S = 120
"""A process that imports Megatron on two shared cores needs 10 to 50 s."""


@contextmanager
def other_rank(checkpoint: Path, target: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Rank 1 of two as a process of its own."""
    command = [sys.executable, rank_process.__file__, checkpoint, target, "1", "2", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(2 * DEADLINE_S)
def test_two_ranks_make_the_weights_of_one(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "hf", moe=True)
    alone = rank_process.run(checkpoint, tmp_path / "one", 0, 1, free_port())
    port = free_port()
    with other_rank(checkpoint, tmp_path / "two", port) as process:
        first = rank_process.run(checkpoint, tmp_path / "two", 0, 2, port)
        second = json.loads(process.communicate(timeout=DEADLINE_S)[0].splitlines()[-1])
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], abs=1e-6)
    for got, again, expected in zip(first["metrics"], second["metrics"], alone["metrics"], strict=True):
        assert got == again == pytest.approx(expected, abs=1e-6)
    for got, expected in zip(first["logprobs"], alone["logprobs"], strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
    assert second["logprobs"] == []
    assert first["refused"] and second["refused"] and alone["refused"]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert max((one[name] - two[name]).abs().max().item() for name in one) < 1e-5
