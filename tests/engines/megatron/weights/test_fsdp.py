"""Checkpoints that FSDP saved with torch DCP convert to Hugging Face folders, bit by bit."""

import json
import logging
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.engines.megatron.weights import convert, fsdp_conversion
from asyncrl.engines.megatron.weights.fsdp_conversion import fsdp_to_hf
from asyncrl.errors import CheckpointFailed, ConfigError
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.tiny import free_port
from tests.forks import Fork

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls without a process group

DEADLINE_S = 540
"""Limit for two processes that import torch and transformers on two shared cores."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and ours[name].equal(theirs[name]) for name in theirs
    )


def saved_by_fsdp(checkpoint: Path, target: Path, *prefix: str) -> Path:
    """Let two processes save the model of ``checkpoint`` as FSDP shards it."""
    arguments = (free_port(), checkpoint, target, *prefix)
    module = "tests.engines.megatron.weights.fsdp_process"
    processes = [Fork(module, rank, *arguments, stderr=subprocess.PIPE) for rank in (0, 1)]
    try:
        for process in processes:
            _, said = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    return target


def saved(folder: Path, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> Path:
    """Save tensors from this process alone, in the same format."""
    save({prefix + name: tensor for name, tensor in tensors.items()}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model before training, with a tokenizer's file."""
    folder = write_tiny(tmp_path_factory.mktemp("fsdp") / "original", TINY["qwen3"], dtype="bfloat16")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def trained(original: Path) -> Path:
    """The same model with other numbers."""
    folder = original.parent / "trained"
    folder.mkdir()
    (folder / "config.json").write_text((original / "config.json").read_text())
    save_file({name: -tensor for name, tensor in tensors_of(original).items()}, folder / "model.safetensors")
    return folder


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("prefix", ["stateful", ""])
def test_what_two_fsdp_ranks_saved_comes_back_to_the_last_bit(
    tmp_path: Path, original: Path, trained: Path, prefix: str
) -> None:
    saved_by_fsdp(trained, tmp_path / "iter_0000003" / "model", prefix)
    flags = {"input-dir": tmp_path / "iter_0000003", "output-dir": tmp_path / "out", "origin-hf-dir": original}
    assert convert.main(["fsdp-to-hf", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(trained))
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer.json"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = transformers.AutoModelForCausalLM.from_pretrained(trained, dtype="auto")
    words = torch.arange(3, 40)[None]
    assert torch.equal(model(words).logits, expected(words).logits)


@pytest.mark.parametrize("prefix", ["model.", "model_state.", "module.", "_fsdp_wrapped_module.", "_orig_mod."])
def test_known_prefixes_and_wrappers_are_stripped(tmp_path: Path, original: Path, trained: Path, prefix: str) -> None:
    saved(tmp_path / "dcp", tensors_of(trained), prefix)
    fsdp_to_hf(tmp_path / "dcp", tmp_path / "out", original)
    assert same_bits(tensors_of(tmp_path / "out"), tensors_of(trained))


def test_float32_weights_get_the_dtype_of_the_original_and_the_log_says_it(
    tmp_path: Path, original: Path, trained: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp_conversion, "PART_BYTES", 5000)  # many parts
    finer = {name: tensor.float() * 1.001 for name, tensor in tensors_of(trained).items()}
    with caplog.at_level(logging.WARNING):
        fsdp_to_hf(saved(tmp_path / "dcp", finer), tmp_path / "out", original)
    assert same_bits(tensors_of(tmp_path / "out"), {name: tensor.bfloat16() for name, tensor in finer.items()})
    assert f"{len(finer)} tensors are converted from torch.float32 to torch.bfloat16" in caplog.text


def test_an_output_layer_tied_to_the_embedding_is_not_stored_twice(tmp_path: Path) -> None:
    tied = write_tiny(tmp_path / "hf", TINY["qwen2.5-tied"], dtype="bfloat16")
    tensors = tensors_of(tied)
    with_head = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    fsdp_to_hf(saved(tmp_path / "dcp", with_head), tmp_path / "out", tied)
    assert same_bits(tensors_of(tmp_path / "out"), tensors)


def test_missing_tensors_are_named_or_copied(tmp_path: Path, original: Path, trained: Path) -> None:
    tensors = tensors_of(trained)
    left_out = tensors.pop("model.norm.weight")
    saved(tmp_path / "dcp", tensors)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of hf-checkpoint: model\.norm\.weight; --add-missing"):
        fsdp_to_hf(tmp_path / "dcp", tmp_path / "out", original)
    fsdp_to_hf(tmp_path / "dcp", tmp_path / "out", original, add_missing=True)
    expected = {**tensors, "model.norm.weight": tensors_of(original)["model.norm.weight"]}
    assert same_bits(tensors_of(tmp_path / "out"), expected)
    assert not torch.equal(left_out, expected["model.norm.weight"])


def test_another_model_is_refused_with_the_first_difference(tmp_path: Path, original: Path, trained: Path) -> None:
    tensors, out = tensors_of(trained), tmp_path / "out"
    saved(tmp_path / "extra", {**tensors, "model.layers.9.x": torch.ones(1)})
    saved(tmp_path / "size", {**tensors, "model.norm.weight": torch.ones(7)})
    saved(tmp_path / "kind", {**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int64)})
    saved(tmp_path / "other", {"decoder.weight": torch.ones(1), "optim.x": torch.ones(1)})
    for name, message in {
        "extra": r"has 1 tensors that hf-checkpoint lacks: model\.layers\.9\.x",
        "size": r"model\.norm\.weight in .* has shape \[7\], hf-checkpoint has \[32\]",
        "kind": r"has dtype torch\.int64, only floating point",
        "other": r"has no tensor of hf-checkpoint under any of the prefixes .*; it has decoder\.weight$",
        "nothing": r"nothing has no \.metadata, nor has .*model: give the folder of one DCP checkpoint",
    }.items():
        with pytest.raises(ConfigError, match=message):
            fsdp_to_hf(tmp_path / name, out, original)
    assert not out.exists() and not (tmp_path / "out.partial").exists()


def test_other_formats_and_full_folders_are_refused(
    tmp_path: Path, original: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "dcp", tensors_of(trained))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    words = ["fsdp-to-hf", str(tmp_path / "dcp"), str(tmp_path / "out"), "--hf-checkpoint", str(original)]
    assert convert.main(words) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path / 'out'} is not empty: give another folder, or --force to replace it\n"
    )
    assert convert.main([*words, "--force"]) == 0
    assert not (tmp_path / "out" / "mine").exists()
    (tmp_path / "dcp" / "common.pt").touch()
    with pytest.raises(ConfigError, match=r"has common\.pt, so it is Megatron's torch_dist format"):
        fsdp_to_hf(tmp_path / "dcp", tmp_path / "out2", original)


def test_damaged_files_are_one_error(tmp_path: Path, original: Path, trained: Path) -> None:
    saved(tmp_path / "dcp", tensors_of(trained))
    for path in (tmp_path / "dcp").glob("*.distcp"):
        path.unlink()
    with pytest.raises(CheckpointFailed, match=r"dcp cannot be read: .* No such file"):
        fsdp_to_hf(tmp_path / "dcp", tmp_path / "out", original)
    (tmp_path / "dcp" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"\.metadata cannot be read"):
        fsdp_to_hf(tmp_path / "dcp", tmp_path / "out", original)


def test_a_quantized_original_is_refused(tmp_path: Path, original: Path, trained: Path) -> None:
    other = tmp_path / "fp8"
    other.mkdir()
    config = {**json.loads((original / "config.json").read_text()), "quantization_config": {"quant_method": "fp8"}}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is quantized: give the folder of the weights that FSDP trained"):
        fsdp_to_hf(saved(tmp_path / "dcp", tensors_of(trained)), tmp_path / "out", other)
