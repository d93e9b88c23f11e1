"""The commands of the conversion as a user starts them: alone, in little memory, and several at once."""

import io
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from asyncrl.engines.megatron.checkpoint.progress import watched
from asyncrl.engines.megatron.weights.conversion import to_hf
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import layout, processes
from tests.engines.megatron.tiny import free_port
from tests.programs import ROOT, program

DEADLINE_S = 540
"""Limit for a process: importing Megatron takes 10 to 50 s on two shared cores, writing 1.8 GB some seconds more."""
LAYERS, HIDDEN, INNER, WORDS = 16, 1024, 4096, 8192
"""A model of 560 MB in bfloat16, its largest weight 17 MB."""
MOST_BYTES = 150 * 2**20
"""Limit of extra memory: a quarter of the model.

Measured: 85 MiB for a weight, its copies, and the memory that the allocator keeps.
"""


@contextmanager
def running(report: Path, steps: list[list[str]], **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = program("tests.engines.megatron.weights.convert_process", report, json.dumps(steps))
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def write_large(folder: Path) -> Path:
    """A random Llama, each layer in a separate file."""
    folder.mkdir()
    config = json.loads((write_tiny(folder / "tiny", TINY["llama3"], dtype="bfloat16") / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": WORDS}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": HIDDEN // 8}
    (folder / "config.json").write_text(json.dumps(config))
    attention = {f"self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
    mlp = {"mlp.gate_proj.weight": (INNER, HIDDEN), "mlp.up_proj.weight": (INNER, HIDDEN)}
    norms = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    layer = {**attention, **mlp, "mlp.down_proj.weight": (HIDDEN, INNER), **norms}
    for number in range(LAYERS):
        tensors = {f"model.layers.{number}.{name}": some(*shape) for name, shape in layer.items()}
        save_file(tensors, folder / f"layer-{number:02}.safetensors")
    ends = {"model.embed_tokens.weight": some(WORDS, HIDDEN), "lm_head.weight": some(WORDS, HIDDEN)}
    save_file({**ends, "model.norm.weight": some(HIDDEN)}, folder / "ends.safetensors")
    return folder


def some(*shape: int) -> torch.Tensor:
    """Random bits, except those of NaN, which is not equal to itself."""
    return torch.randint(0, 0x7F80, shape, dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.timeout(2 * DEADLINE_S)
def test_peak_memory_of_a_conversion_is_bounded_by_single_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf, tiny = write_large(tmp_path / "hf"), tmp_path / "hf" / "tiny"
    names = {what: str(tmp_path / what) for what in ("saved", "back", "tiny-saved", "tiny-back", "nothing")}
    steps = [
        ["command", "to-torch-dist", str(tiny), names["tiny-saved"]],
        ["command", "to-hf", names["tiny-saved"], names["tiny-back"], "--hf-checkpoint", str(tiny)],
        ["command", "to-torch-dist", str(hf), names["saved"]],
        ["command", "to-hf", names["saved"], names["back"], "--hf-checkpoint", str(hf)],
        ["command", "to-torch-dist", names["nothing"], names["nothing"]],
    ]
    with running(tmp_path / "report", steps) as process:
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    _, _, there, back, nothing = json.loads((tmp_path / "report").read_text())
    assert there["code"] == back["code"] == 0
    assert same_file_bits(hf, tmp_path / "back")
    assert sum(path.stat().st_size for path in hf.glob("*.safetensors")) > 3.5 * MOST_BYTES
    assert max(there["most"], back["most"]) - there["before"] < MOST_BYTES, (there, back)
    assert nothing["code"] == 2
    assert said.splitlines()[-1].startswith("error: hf-checkpoint: no ")


def same_file_bits(one: Path, other: Path) -> bool:
    """Compare two checkpoints one tensor at a time, as if both were loaded."""
    with safe_open(other / "model.safetensors", framework="pt", backend="pread") as ours:
        names = set(ours.keys())
        for path in one.glob("*.safetensors"):
            with safe_open(path, framework="pt", backend="pread") as theirs:
                for name in theirs.keys():  # noqa: SIM118
                    if not ours.get_tensor(name).equal(theirs.get_tensor(name)):
                        return False
                    names.remove(name)
    return not names


@pytest.mark.timeout(2 * DEADLINE_S)
def test_two_processes_share_the_work_and_one_reads_what_they_and_a_split_model_wrote(tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf", TINY["glm4.5"], dtype="bfloat16")
    saved, back, split = (str(tmp_path / name) for name in ("saved", "back", "split"))
    steps = [
        ["command", "to-torch-dist", str(hf), saved, "--pipeline-model-parallel-size", "2"],
        ["command", "to-hf", saved, back, "--hf-checkpoint", str(hf)],
        ["split", str(hf), split],
    ]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "PORTS": ",".join(str(free_port()) for _ in steps)}
    with (
        running(tmp_path / "first", steps, RANK="0", **meeting) as first,
        running(tmp_path / "second", steps, RANK="1", **meeting) as second,
    ):
        said = [process.communicate(timeout=DEADLINE_S)[1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert [step["code"] for name in ("first", "second") for step in json.loads((tmp_path / name).read_text())] == [
        0
    ] * 6
    assert {path.name for path in (tmp_path / "saved" / "release").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    with processes(0, 1, free_port()), layout():
        to_hf(tmp_path / "split", tmp_path / "joined", hf)
        to_hf(tmp_path / "saved", tmp_path / "alone", hf)
    expected = load_file(hf / "model.safetensors")
    for folder in (tmp_path / "back", tmp_path / "joined", tmp_path / "alone"):
        found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)
    assert len(list((tmp_path / "back").glob("model-0000?-of-00002.safetensors"))) == 2


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_long_conversion_reports_progress_on_the_first_process_only(tmp_path: Path) -> None:
    lines, screen, other = io.StringIO(), Terminal(), Terminal()
    for stream, is_first in ((lines, True), (screen, True), (other, False)):
        with watched("to torch_dist", 4 * 2**30, is_first=is_first, stream=stream) as watch:
            watch.moved(3 * 2**30)
            watch.wrote(tmp_path / "__0_0.distcp", 3 * 2**30)
    assert lines.getvalue() == "to torch_dist: __0_0.distcp, 3.00 GiB; 75% of 4.00 GiB\n"
    assert "3.0/4.0 GiB" in screen.getvalue()
    assert other.getvalue() == ""
