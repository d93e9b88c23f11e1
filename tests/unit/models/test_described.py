"""Megatron's flags that describe a model, against its config.json."""

from pathlib import Path

import pytest

from asyncrl.config.areas import FlagWords
from asyncrl.config.slime.table import TABLE
from asyncrl.models.described import COMPARED, otherwise
from asyncrl.models.shape import read_config, shape_of
from tests.unit.config.test_slime import scripts

MODELS = Path(__file__).parents[2] / "launch" / "models"
SCRIPTS = {
    "run-qwen3-4B.sh": "qwen3-4b",
    "run-glm4-9B.sh": "glm-z1-9b",
    "run-qwen3-30B-A3B.sh": "qwen3-30b-a3b",
    "run-glm4.7-355B-A32B.sh": "glm4.5-355b-a32b",
    "run-deepseek-r1.sh": "deepseek-r1",
}


def described(script: str) -> dict[str, FlagWords]:
    """The flags in a script of slime that describe its model."""
    (flags,) = (flags for title, flags in scripts() if title.partition(" ")[0] == script)
    found: dict[str, FlagWords] = {}
    for flag, *words in flags:
        if flag.removeprefix("--") in COMPARED:
            found[flag.removeprefix("--")] = True if not words else words[0] if len(words) == 1 else tuple(words)
    return found


def lines(model: str, given: dict[str, FlagWords]) -> list[str]:
    config = read_config(MODELS / model)
    return otherwise(config, shape_of(config), given)


def test_every_flag_that_describes_a_model_is_compared() -> None:
    assert {name for name, row in TABLE.items() if row.is_compared} == COMPARED


@pytest.mark.parametrize(("script", "model"), SCRIPTS.items())
def test_slimes_description_of_a_model_is_its_config_json(script: str, model: str) -> None:
    given = described(script)
    assert len(given) >= 7
    assert lines(model, given) == []


@pytest.mark.parametrize(("script", "model"), SCRIPTS.items())
def test_the_description_of_another_family_is_refused(script: str, model: str) -> None:
    others = {other for other in SCRIPTS.values() if other.partition("-")[0] != model.partition("-")[0]}
    assert all(lines(other, described(script)) for other in others)


@pytest.mark.parametrize(
    ("model", "name", "value", "line"),
    [
        ("qwen3-4b", "num-experts", "8", "--num-experts 8: Qwen3ForCausalLM has nothing of the kind; leave it out"),
        ("qwen3-4b", "vocab-size", "32000", "--vocab-size 32000: Qwen3ForCausalLM has 151936 by its config.json"),
        ("qwen3-4b", "add-qkv-bias", True, "--add-qkv-bias: Qwen3ForCausalLM has no such thing by its config.json"),
        ("qwen3-4b", "normalization", "LayerNorm", "--normalization LayerNorm: Qwen3ForCausalLM has RMSNorm"),
        ("qwen3-4b", "moe-layer-freq", "1", "--moe-layer-freq 1: Qwen3ForCausalLM has no experts"),
        ("qwen3-4b", "spec", ("a.b", "c"), "--spec a.b c: Qwen3ForCausalLM decides the layers"),
        ("qwen3-30b-a3b", "moe-router-topk", "4", "--moe-router-topk 4: Qwen3MoeForCausalLM has 8 by its config.json"),
        ("qwen3-30b-a3b", "moe-router-pre-softmax", True, "--moe-router-pre-softmax: Qwen3MoeForCausalLM has no such"),
        (
            "deepseek-r1",
            "moe-layer-freq",
            "[0]*2+[1]*59",
            "--moe-layer-freq [0]*2+[1]*59: DeepseekV3ForCausalLM has [0]*3+[1]*58",
        ),
        ("deepseek-r1", "moe-layer-freq", "[2]*61", "--moe-layer-freq [2]*61: DeepseekV3ForCausalLM has [0]*3+[1]*58"),
        ("deepseek-r1", "rotary-scaling-factor", "32", "--rotary-scaling-factor 32: DeepseekV3ForCausalLM has 40"),
        ("deepseek-r1", "group-query-attention", True, "--group-query-attention: DeepseekV3ForCausalLM has no such"),
    ],
)
def test_a_flag_that_describes_another_model_is_one_line(model: str, name: str, value: FlagWords, line: str) -> None:
    (found,) = lines(model, {name: value})
    assert found.startswith(line)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}


def test_slimes_description_of_llama_has_its_scaling_factor() -> None:
    given: dict[str, FlagWords] = {"use-rope-scaling": True, "rotary-scaling-factor": "8.0"}
    assert otherwise(LLAMA, shape_of(LLAMA), given) == []
    (line,) = otherwise(LLAMA, shape_of(LLAMA), {"rotary-scaling-factor": "32.0"})
    assert line == "--rotary-scaling-factor 32.0: LlamaForCausalLM has 8.0 by its config.json; leave it out"
    plain = {**LLAMA, "rope_scaling": None}
    assert otherwise(plain, shape_of(plain), {"rotary-scaling-factor": "1"}) == []
    assert otherwise(plain, shape_of(plain), {"rotary-scaling-factor": "8"})


def test_a_bias_that_latent_attention_does_not_read_is_accepted() -> None:
    assert lines("deepseek-r1", {"add-qkv-bias": True}) == []  # slime gives it for GLM-4.7-Flash


def test_other_activations_are_refused() -> None:
    config = read_config(MODELS / "qwen3-4b")
    (line,) = otherwise({**config, "hidden_act": "gelu"}, shape_of(config), {"swiglu": True})
    assert line == "--swiglu: Qwen3ForCausalLM has no such thing by its config.json; leave it out"
    assert otherwise(config, shape_of(config), {"swiglu": True, "optimizer": "adam"}) == []
