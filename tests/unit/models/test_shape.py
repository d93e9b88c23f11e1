"""Models that cannot be trained are refused before anything starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.models.rope import YarnRope
from asyncrl.models.shape import read_shape

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


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "rope_scaling": YARN,
    "num_nextn_predict_layers": 1,
}
"""The values of DeepSeek V3 for keys that Qwen3 lacks."""
FLASH = {
    **DEEPSEEK,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 1.0,
    "rope_scaling": None,
}
"""The values of GLM-4.7-Flash for keys that Qwen3 lacks."""


def written(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**QWEN3, "rope_theta": 1e6, **changes}))
    return folder


def test_rope_theta_is_found_in_the_old_place_and_in_the_new_one(tmp_path: Path) -> None:
    assert read_shape(written(tmp_path)).rope.theta == 1e6
    (tmp_path / "config.json").write_text(
        json.dumps({**QWEN3, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}})
    )
    assert read_shape(tmp_path).rope.theta == 5e5


def test_the_dtype_of_the_checkpoint_has_two_names(tmp_path: Path) -> None:
    assert read_shape(written(tmp_path)).dtype == "bfloat16"
    assert read_shape(written(tmp_path, dtype="float32")).dtype == "float32"


def test_deepseek_v3s_numbers_are_read(tmp_path: Path) -> None:
    shape = read_shape(written(tmp_path, **DEEPSEEK, quantization_config={**FP8, "fmt": "e4m3"}))
    assert shape.latent is not None and shape.experts is not None
    assert (shape.latent.query_rank, shape.latent.rotary_dim, shape.latent.value_dim) == (1536, 64, 128)
    assert (shape.experts.num_groups, shape.experts.num_shared, shape.experts.num_dense_layers) == (8, 1, 3)
    assert shape.experts.scores == "sigmoid" and shape.experts.has_bias
    assert isinstance(shape.rope.scaling, YarnRope) and shape.rope.scaling.factor == 40
    assert (shape.fp8_block, shape.num_next_token_layers) == ((128, 128), 1)


def test_glm_flashs_numbers_are_read_as_released_and_as_transformers_writes_them(tmp_path: Path) -> None:
    shape = read_shape(written(tmp_path, **FLASH))
    assert shape.latent is not None and shape.experts is not None
    assert (shape.latent.query_rank, shape.latent.plain_dim, shape.latent.value_dim) == (768, 192, 256)
    assert (shape.experts.num_experts, shape.experts.num_dense_layers, shape.experts.weight_scale) == (64, 1, 1.8)
    assert shape.experts.scores == "sigmoid" and shape.experts.has_bias
    saved = {**FLASH, "first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse"], "head_dim": 64}
    assert read_shape(written(tmp_path, **saved)) == shape
    without = {key: it for key, it in FLASH.items() if key not in ("first_k_dense_replace", "partial_rotary_factor")}
    assert read_shape(written(tmp_path, **without)) == shape


def test_null_in_config_json_means_absent(tmp_path: Path) -> None:
    changes = {"architectures": ["LlamaForCausalLM"], "head_dim": None, "partial_rotary_factor": None}
    shape = read_shape(written(tmp_path, **changes))
    assert (shape.head_dim, shape.rope.fraction, shape.has_qkv_bias) == (8, 1.0, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "cannot train GemmaForCausalLM; supported: Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM, "
            "LlamaForCausalLM, Glm4ForCausalLM, Glm4MoeForCausalLM, "
            "Glm4MoeLiteForCausalLM, DeepseekV3ForCausalLM",
        ),
        ({"architectures": None}, "config.json names no architectures"),
        ({"attention_bias": True}, "attention_bias = True, only False"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn', only 'default'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type = 'linear', only 'default'"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "yarn"}}, "only 'default' or 'llama3'"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3"}}, "has no 'factor'"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "has no 'num_experts|num_local_experts'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method = 'awq', only 'fp8' in blocks"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func = 'softmax', only 'sigmoid'"),
        ({**DEEPSEEK, "num_experts_per_tok": 6}, "num_experts_per_tok = 6 from topk_group = 4 groups"),
        ({**DEEPSEEK, "num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok = 1 and sigmoid"),
        (
            {
                **{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 1},
                **{"moe_intermediate_size": 16, "norm_topk_prob": True},
            },
            "cannot train with num_experts_per_tok = 1 and norm_topk_prob = True",
        ),
        ({**FLASH, "mlp_layer_types": ["sparse", "dense"]}, "only one entry for each layer, with all dense layers"),
        ({**FLASH, "mlp_layer_types": ["dense"]}, "only one entry for each layer, with all dense layers first"),
        (
            {**FLASH, "mlp_layer_types": ["dense", "dense"]},
            "has first_k_dense_replace = 1, but 2 dense layers in mlp_layer_types",
        ),
        ({**FLASH, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, only 1.0"),
        ({**FLASH, "rope_scaling": YARN}, "rope_type = 'yarn', only 'default'"),
        ({**DEEPSEEK, "rope_scaling": {**YARN, "truncate": False}}, "truncate = False in yarn, only True"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read_shape(written(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_checkpoint_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json; give a local folder in Hugging Face format"):
        read_shape(tmp_path)


def test_checking_imports_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, asyncrl.engines.megatron; heavy = {'torch', 'megatron', 'numpy', 'ray'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
