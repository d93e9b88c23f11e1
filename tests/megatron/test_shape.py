"""What is refused before anything starts."""

import json
import subprocess
import sys

import pytest

from asyncrl.engines.megatron.shape import check_architecture, read_shape
from asyncrl.errors import ConfigError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_scaling": None,
}


def written(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**QWEN3, "rope_theta": 1e6, **changes}))
    return folder


def test_rope_theta_is_found_in_the_old_place_and_in_the_new_one(tmp_path):
    assert read_shape(written(tmp_path)).rope_theta == 1e6
    (tmp_path / "config.json").write_text(
        json.dumps({**QWEN3, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    )
    assert read_shape(tmp_path).rope_theta == 5e5


def test_the_dtype_of_the_checkpoint_has_two_names(tmp_path):
    assert read_shape(written(tmp_path)).dtype == "bfloat16"
    assert read_shape(written(tmp_path, dtype="float32")).dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "cannot train LlamaForCausalLM; supported: Qwen3ForCausalLM, Qwen3MoeForCausalLM",
        ),
        ({"architectures": None}, "cannot train none"),
        ({"attention_bias": True}, "attention_bias = True, only False"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn', only 'default'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "has no 'num_experts|num_local_experts'"),
    ],
)
def test_what_cannot_be_trained_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        check_architecture(written(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_checkpoint_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        check_architecture(tmp_path)


def test_checking_imports_neither_torch_nor_megatron():
    program = (
        "import sys, asyncrl.engines.megatron; heavy = {'torch', 'megatron', 'numpy', 'ray'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
