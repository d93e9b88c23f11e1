"""The flags of slime's converters, as its guides print them."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.weights import convert

from asyncrl.engines.megatron.checkpoint.directory import read_notes
from asyncrl.engines.megatron.weights.convert_flags import parser, shape_of_flags
from tests.engines.megatron.families import TINY, write_tiny

pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore:::megatron")  # both warn about calls by Megatron

MODEL_ARGS = """
    --swiglu --num-layers 3 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm
    --norm-epsilon 1e-5 --rotary-base 2000000 --vocab-size 96 --kv-channels 16 --qk-layernorm
    --untie-embeddings-and-output-weights --moe-layer-freq [0]*1+[1]*46
"""
"""The flags of a script of slime's for Qwen3, with another rotary base than ``config.json``."""


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the command sets it; this restores it


def test_the_commands_of_the_guides_convert_and_back(tmp_path: Path) -> None:
    hf, saved, back = write_tiny(tmp_path / "hf", TINY["qwen3"]), tmp_path / "saved", tmp_path / "back"
    assert convert.main(["to-torch-dist", *MODEL_ARGS.split(), "--hf-checkpoint", str(hf), "--save", str(saved)]) == 0
    notes = read_notes(saved / "release")
    assert notes is not None and notes["model"]["rope"]["theta"] == 2e6  # so that a run with the same flags loads it
    words = ["to-hf", "--input-dir", str(saved / "release"), "--output-dir", str(back), "--origin-hf-dir", str(hf)]
    assert convert.main([*words, "--vocab-size", "96", "--force"]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (back, hf))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_model_flag_that_contradicts_the_tensors_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write_tiny(tmp_path / "hf", TINY["qwen3"])
    assert convert.main(["to-torch-dist", str(hf), str(tmp_path / "out"), "--num-layers", "4"]) == 2
    said = capsys.readouterr().err
    assert (
        said.splitlines()[-1] == "error: num-layers 4: config.json says 3, and the checkpoint's tensors have that size"
    )


@pytest.mark.parametrize(
    "words",
    [
        # slime 624b824a, docs/en/examples/deepseek-r1.md; scripts/models/glm4-9B.sh; docs/en/platform_support
        "to-torch-dist --tensor-model-parallel-size 1 --pipeline-model-parallel-size 8 --expert-tensor-parallel-size 1 "
        "--expert-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 6 "
        "--hf-checkpoint A --save B",
        "to-torch-dist --spec slime_plugins.models.glm4 get_glm_spec --swiglu --hf-checkpoint A --save B",
        "to-torch-dist --no-gradient-accumulation-fusion --hf-checkpoint A --save B",
        "to-hf --input-dir A --output-dir B --origin-hf-dir C --chunk-size 1000",
    ],
)
def test_flags_of_slimes_guides_and_models_are_accepted(words: str) -> None:
    asked = parser(None, words.split()).parse_args(words.split())
    assert (asked.source, asked.target) == (Path("A"), Path("B"))


@pytest.mark.parametrize(
    "words",
    [
        "to-torch-dist A B --vocab-size 128 --pipeline-model-parallel-size 4",
        "to-torch-dist --pipeline-model-parallel-size 4 --hf-checkpoint A --save B --vocab-size 128",
        "to-hf A B --hf-checkpoint C --vocab-size 128",
        "to-hf --input-dir A --output-dir B --origin-hf-dir C --vocab-size 128 --model-name glm4",
        "fsdp-to-hf A B --hf-checkpoint C",
        "fsdp-to-hf --input-dir A --output-dir=B --origin-hf-dir C",
    ],
)
def test_both_forms_name_the_same_folders(words: str) -> None:
    asked = parser("", words.split()).parse_args(words.split())
    assert (asked.source, asked.target) == (Path("A"), Path("B"))
    assert getattr(asked, "hf_checkpoint", Path("C")) == Path("C")
    assert getattr(asked, "vocab_size", 128) == 128


def test_shape_flags_default_to_config_json() -> None:
    words = ["to-torch-dist", "A", "B", "--rotary-base", "1e6"]
    found = shape_of_flags(parser("", words).parse_args(words))
    assert (found.rotary_base, found.num_layers) == (1e6, None)


@pytest.mark.parametrize(
    "words", ["to-hf A B", "to-torch-dist A --save B", "to-torch-dist A B --no-such-flag", "x A B"]
)
def test_a_wrong_command_line_ends_with_code_two(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        convert.main(words.split())
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err
