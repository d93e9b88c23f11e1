"""Hugging Face to torch_dist and back, by the commands, is the same bits."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from families import TINY, write_tiny
from safetensors.torch import load_file
from tiny import free_port, write_checkpoint

COMMAND = ("-m", "asyncrl.engines.megatron.convert")
DEADLINE_S = 120
"""Importing Megatron takes 10 to 50 s on two shared cores."""
BOTH_WAYS = """
import sys
from asyncrl.engines.megatron.convert import main
hf, saved, back = sys.argv[1:]
sys.exit(main(["to-torch-dist", hf, saved]) or main(["to-hf", saved, back, "--hf-checkpoint", hf]))
"""


def same_bits(one, other) -> bool:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and ours[name].equal(theirs[name]) for name in theirs
    )


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_round_trip_in_bfloat16_changes_no_bit(tmp_path):
    hf = write_checkpoint(tmp_path / "hf", moe=True, dtype="bfloat16")
    paths = [str(hf), str(tmp_path / "saved"), str(tmp_path / "back")]
    subprocess.run([sys.executable, "-c", BOTH_WAYS, *paths], check=True, timeout=DEADLINE_S)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert same_bits(hf, tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_text() == (hf / "config.json").read_text()


@contextmanager
def running(*arguments: str, rank: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The command as torchrun starts it, one of two."""
    meeting = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen([sys.executable, *COMMAND, *arguments], env={**os.environ, **meeting})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(3 * DEADLINE_S)
def test_what_two_processes_converted_one_converts_back(tmp_path):
    hf, saved, port = write_tiny(tmp_path / "hf", TINY["glm4.5"]), tmp_path / "saved", free_port()
    there = ("to-torch-dist", str(hf), str(saved), "--expert-model-parallel-size", "2")
    with running(*there, rank=0, port=port) as first, running(*there, rank=1, port=port) as second:
        assert [first.wait(DEADLINE_S), second.wait(DEADLINE_S)] == [0, 0]
    back = ("to-hf", str(saved), str(tmp_path / "back"), "--hf-checkpoint", str(hf))
    subprocess.run([sys.executable, *COMMAND, *back], check=True, timeout=DEADLINE_S)
    assert same_bits(hf, tmp_path / "back")


@pytest.mark.timeout(2 * DEADLINE_S)
def test_what_can_not_be_converted_is_one_line(tmp_path):
    command = [sys.executable, *COMMAND, "to-torch-dist", str(tmp_path), str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: hf-checkpoint: cannot read")
