"""A round trip between Hugging Face and torch_dist changes no bit, for files by any writer and in any layout."""

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from asyncrl.engines.megatron.checkpoint import hf_files
from asyncrl.engines.megatron.checkpoint.state import sharded_weights
from asyncrl.engines.megatron.model.build import build_model
from asyncrl.engines.megatron.weights.conversion import to_hf, to_torch_dist
from asyncrl.engines.megatron.weights.hf_weights import save_hf
from asyncrl.engines.megatron.weights.sharding import local_weights
from asyncrl.errors import CheckpointFailed, ConfigError
from asyncrl.models.shape import read_config, read_shape
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import layout, loaded, processes
from tests.engines.megatron.tiny import free_port

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

PADDED = 128
"""Rows of a padded embedding; the tiny models have a vocabulary size of 96."""


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with processes(0, 1, free_port()), layout():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A Hugging Face folder of each family, in bfloat16."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write_tiny(root / name, tiny, dtype="bfloat16") for name, tiny in TINY.items()}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and ours[name].equal(theirs[name]) for name in theirs
    )


def saved_by_megatron(checkpoint: Path, target: Path, *, moe_layer_freq: object = None) -> Path:
    """Let Megatron itself write the model in ``checkpoint``."""
    target.mkdir()
    model, _ = loaded(checkpoint, torch.bfloat16)
    if moe_layer_freq is not None:
        model.decoder.config.moe_layer_freq = moe_layer_freq
    dist_checkpointing.save(sharded_weights(model), str(target))
    return target


def read_by_megatron(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of ``folder``, read as a run with --load reads them."""
    model = build_model(read_shape(checkpoint), torch.device("cpu"), torch.bfloat16)
    model.load_state_dict(dist_checkpointing.load(sharded_weights(model), str(folder))["model"])
    return {name: weight.detach() for name, weight in local_weights(model).items()}


@pytest.mark.parametrize("family", TINY)
def test_a_round_trip_changes_no_bit_and_megatron_reads_it_between(
    tmp_path: Path, checkpoints: Mapping[str, Path], family: str
) -> None:
    hf = checkpoints[family]
    to_torch_dist(hf, tmp_path / "saved")
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "release"
    to_hf(tmp_path / "saved", tmp_path / "back", hf)
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(hf))
    assert (tmp_path / "back" / "config.json").read_text() == (hf / "config.json").read_text()
    model, _ = loaded(hf, torch.bfloat16)
    expected = {name: weight.detach() for name, weight in local_weights(model).items()}
    assert same_bits(read_by_megatron(hf, tmp_path / "saved" / "release"), expected)


@pytest.mark.parametrize("family", ["qwen2.5-tied", "qwen3", "glm4.5", "deepseek-v3"])
def test_metadata_equals_what_megatron_writes(tmp_path: Path, checkpoints: Mapping[str, Path], family: str) -> None:
    to_torch_dist(checkpoints[family], tmp_path / "ours")
    theirs = saved_by_megatron(checkpoints[family], tmp_path / "theirs")
    assert described(tmp_path / "ours" / "release") == described(theirs)
    assert (tmp_path / "ours" / "release" / "metadata.json").read_text() == (theirs / "metadata.json").read_text()


QKV, MLP, EXPERTS = (
    "self_attention.linear_qkv.layer_norm_weight",
    "mlp.linear_fc1.layer_norm_weight",
    "pre_mlp_layernorm.weight",
)
Q_UP, KV_UP = (f"self_attention.linear_{name}_up_proj.layer_norm_weight" for name in ("q", "kv"))


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [
        ("qwen2.5", {QKV, MLP}, {QKV, MLP}),
        ("qwen3-moe", {QKV, EXPERTS}, {QKV, EXPERTS}),
        ("glm4.5-air", {QKV, MLP}, {QKV, EXPERTS}),
        ("deepseek-v3", {"input_layernorm.weight", Q_UP, KV_UP, MLP}, {"input_layernorm.weight", Q_UP, KV_UP, EXPERTS}),
        ("moonlight", {"input_layernorm.weight", KV_UP, MLP}, {"input_layernorm.weight", KV_UP, EXPERTS}),
    ],
)
def test_norms_are_where_transformer_engines_layers_have_them(
    tmp_path: Path, checkpoints: Mapping[str, Path], family: str, first: set[str], last: set[str]
) -> None:
    """The expected names are those in megatron-core's gpt_layer_specs.py: such layers need a GPU."""
    to_torch_dist(checkpoints[family], tmp_path)
    names, _, _ = described(tmp_path / "release")
    norms = {name for name in names if "norm" in name and "q_layernorm" not in name and "k_layernorm" not in name}
    for layer, expected in ((0, first), (2, last)):
        in_layer = re.compile(rf"decoder\.layers\.({layer}\.)?(?=\D)")  # layers that are all alike have one tensor
        assert {in_layer.sub("", name) for name in norms if in_layer.match(name)} == expected


def described(folder: Path) -> tuple[Set[str], dict[str, Any], Set[Any]]:
    """The names of all entries; the shape, dtype and parts of each tensor; and the keys of the stored data."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    tensors = {
        key: (found.size, found.properties.dtype, sorted(str(asdict(chunk)) for chunk in found.chunks))
        for key, found in metadata.state_dict_metadata.items()
        if hasattr(found, "chunks")
    }
    return metadata.state_dict_metadata.keys(), tensors, metadata.storage_data.keys()


@pytest.mark.parametrize("moe_layer_freq", [1, [1, 1, 1]], ids=["layers together", "layers apart"])
def test_layers_may_be_stored_stacked_or_one_by_one(
    tmp_path: Path, checkpoints: Mapping[str, Path], moe_layer_freq: int | list[int]
) -> None:
    hf = checkpoints["qwen3-moe"]
    theirs = saved_by_megatron(hf, tmp_path / "theirs", moe_layer_freq=moe_layer_freq)
    to_hf(theirs, tmp_path / "back", hf)
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(hf))


@pytest.mark.parametrize("family", ["qwen2.5-tied", "qwen3"])
def test_padded_embeddings_are_written_read_by_a_run_and_cut(
    tmp_path: Path, checkpoints: Mapping[str, Path], family: str
) -> None:
    hf = checkpoints[family]
    to_torch_dist(hf, tmp_path / "padded", vocab_size=PADDED)
    sizes = described(tmp_path / "padded" / "release")[1]
    assert sizes["embedding.word_embeddings.weight"][0] == (PADDED, 32)
    to_hf(tmp_path / "padded", tmp_path / "back", hf)
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(hf))
    to_torch_dist(hf, tmp_path / "plain")
    plain = read_by_megatron(hf, tmp_path / "plain" / "release")
    assert same_bits(read_by_megatron(hf, tmp_path / "padded" / "release"), plain)


def test_vocab_size_sets_the_embedding_rows_and_config_json(tmp_path: Path, checkpoints: Mapping[str, Path]) -> None:
    hf = checkpoints["qwen3"]
    to_torch_dist(hf, tmp_path / "padded", vocab_size=PADDED)
    to_hf(tmp_path / "padded", tmp_path / "back", hf, vocab_size=100)
    before, after = tensors_of(hf), tensors_of(tmp_path / "back")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after[name].shape == (100, 32)
        assert after[name][:96].equal(before[name])
        assert not after[name][96:].any()
    assert read_config(tmp_path / "back") == {**read_config(hf), "vocab_size": 100}


def test_an_impossible_vocab_size_is_refused_in_one_line(tmp_path: Path, checkpoints: Mapping[str, Path]) -> None:
    hf = checkpoints["qwen3"]
    with pytest.raises(ConfigError, match=r"^vocab-size 95: .* has a vocabulary of 96 tokens; it cannot be truncated$"):
        to_torch_dist(hf, tmp_path / "fewer", vocab_size=95)
    to_torch_dist(hf, tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"^vocab-size 97: embedding.word_embeddings.weight in .* has only 96 rows$"):
        to_hf(tmp_path / "saved", tmp_path / "back", hf, vocab_size=97)
    assert not list(tmp_path.glob("back*"))


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path, checkpoints: Mapping[str, Path]) -> None:
    hf = checkpoints["qwen3-moe"]
    foreign = saved_by_megatron(hf, tmp_path / "foreign")
    for number, (key, value, line) in enumerate(
        [
            ("hidden_size", 64, "word_embeddings.weight in .* has shape .96, 32., hf-checkpoint requires .96, 64.$"),
            ("num_hidden_layers", 2, "has weights that hf-checkpoint lacks: decoder.layers.2"),
            ("num_hidden_layers", 4, "cannot be loaded: it has no decoder.layers.3"),
        ]
    ):
        other = tmp_path / f"other{number}"
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**read_config(hf), key: value}))
        with pytest.raises((ConfigError, CheckpointFailed), match=line):
            to_hf(foreign, tmp_path / "back", other)
    to_torch_dist(checkpoints["qwen3"], tmp_path / "ours")
    with pytest.raises(ConfigError, match="is of another model than hf-checkpoint: architecture"):
        to_hf(tmp_path / "ours", tmp_path / "back", hf)


def test_fp8_and_layers_for_multi_token_prediction_come_out_as_a_saved_model_has_them(tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf", TINY["moonlight"], dtype="bfloat16")
    tensors = tensors_of(hf)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
    tensors |= {f"{name}_scale_inv": torch.rand(1, 2) + 0.5, "model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file(tensors, hf / "model.safetensors")
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    changed = {**read_config(hf), "quantization_config": fp8, "num_nextn_predict_layers": 1}
    (hf / "config.json").write_text(json.dumps(changed))
    model, shape = loaded(hf, torch.bfloat16)
    save_hf(model, shape, hf, tmp_path / "expected")
    to_torch_dist(hf, tmp_path / "saved")
    to_hf(tmp_path / "saved", tmp_path / "back", hf)
    assert same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "expected"))
    assert tensors_of(tmp_path / "back")[name].dtype == torch.bfloat16
    assert (tmp_path / "back" / "config.json").read_text() == (tmp_path / "expected" / "config.json").read_text()


def test_leftovers_of_a_killed_conversion_are_removed_and_a_complete_checkpoint_is_kept(
    tmp_path: Path, checkpoints: Mapping[str, Path]
) -> None:
    release = tmp_path / "saved" / "release"
    release.mkdir(parents=True)
    (release / "__1_7.distcp").write_bytes(b"half")
    to_torch_dist(checkpoints["qwen3"], tmp_path / "saved")
    assert [path.name for path in release.glob("*.distcp")] == ["__0_0.distcp"]
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(ConfigError, match="has checkpoints already: convert to an empty folder"):
        to_torch_dist(checkpoints["llama3"], tmp_path / "saved")


def test_a_target_that_is_no_model_is_refused_and_keeps_its_files(
    tmp_path: Path, checkpoints: Mapping[str, Path]
) -> None:
    hf, saved = checkpoints["llama3"], tmp_path / "saved"
    to_torch_dist(hf, saved)
    thesis = tmp_path / "mine" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years")
    for target in (thesis.parent, thesis):
        with pytest.raises(ConfigError, match=rf"^{target} is not a model that may be replaced: give another folder$"):
            to_hf(saved, target, hf)
    assert thesis.read_text() == "years"
    for target in (saved, tmp_path):
        (target / "config.json").touch()  # checkpoints may be in the folder of a model
        with pytest.raises(ConfigError, match=rf"^{target} contains {saved / 'release'}, which is to be converted"):
            to_hf(saved, target, hf)
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        to_hf(saved, tmp_path / "empty", hf)
    assert same_bits(tensors_of(tmp_path / "empty"), tensors_of(hf))


def test_damaged_files_are_refused_in_one_line_and_leave_no_target_folder(
    tmp_path: Path, checkpoints: Mapping[str, Path]
) -> None:
    hf = checkpoints["llama3"]
    to_torch_dist(hf, tmp_path / "saved")
    (file,) = (tmp_path / "saved" / "release").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.truncate(20_000)
    with pytest.raises(CheckpointFailed, match="release cannot be loaded: "):
        to_hf(tmp_path / "saved", tmp_path / "back", hf)
    assert not (tmp_path / "back").exists()
    (tmp_path / "saved" / "release" / ".metadata").write_bytes(b"not a description")
    with pytest.raises(CheckpointFailed, match="release cannot be loaded: "):
        to_hf(tmp_path / "saved", tmp_path / "back", hf)


def test_folders_beside_the_files_of_a_model_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("tokenized", "old.model"):
        (source / name).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text("{}")
    hf_files.replace_checkpoint([("weight", torch.zeros(2))], source, tmp_path / "saved", {})
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_safetensors_header_at_its_limit_starts_another_file(tmp_path: Path) -> None:
    tensors = {f"weight.{'x' * 60}.{number}": torch.full((3,), number, dtype=torch.bfloat16) for number in range(3000)}
    shards = hf_files.write_shards(tensors.items(), tmp_path)
    assert len(shards) == 2  # 3,000 times about 140 bytes
    assert same_bits(tensors_of(tmp_path), tensors)
    assert [name for shard in shards for name in shard.names] == list(tensors)


def test_tensors_of_mixed_dtypes_and_layouts_survive_a_round_trip(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "float": torch.tensor([1.5, -2.0]),
        "number": torch.tensor(2.5),
        "none": torch.empty(0, 4, dtype=torch.float16),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }
    (shard,) = hf_files.write_shards(tensors.items(), tmp_path)
    assert same_bits(load_file(shard.path), tensors)
