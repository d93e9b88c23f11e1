"""A tiny checkpoint of every family, random, made by transformers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **{**COMMON, "num_key_value_heads": 4},
    **EXPERTS,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 8,  # so small that the test's sequences are long
    "beta_fast": 4.0,  # with DeepSeek's 32 a head this small would have no fast frequency
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A model of one family."""

    name: str
    """The family's prefix of class names in transformers, before ``Config`` and ``ForCausalLM``."""
    config: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the family's real checkpoints have and transformers does not write."""


TINY: Mapping[str, Tiny] = {
    "qwen2.5": Tiny(name="Qwen2", config=COMMON),
    "qwen2.5-tied": Tiny(name="Qwen2", config={**COMMON, "tie_word_embeddings": True}),
    "qwen3": Tiny(name="Qwen3", config={**COMMON, "head_dim": 16}),
    "qwen3-moe": Tiny(
        name="Qwen3Moe",
        config={**COMMON, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "llama3": Tiny(name="Llama", config={**COMMON, "head_dim": 8, "rope_parameters": LLAMA3}),
    "glm4": Tiny(name="Glm4", config={**COMMON, "head_dim": 16, "pad_token_id": None, "attention_bias": True}),
    "glm4.5": Tiny(
        name="Glm4Moe",
        config={**COMMON, **EXPERTS, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    ),
    "glm4.5-air": Tiny(name="Glm4Moe", config={**COMMON, **EXPERTS, "head_dim": 16, "attention_bias": True}),
    "glm4.7-flash": Tiny(
        name="Glm4MoeLite",
        config={key: it for key, it in LATENT.items() if key != "first_k_dense_replace"}
        | {"q_lora_rank": 24, "n_shared_experts": 1, "routed_scaling_factor": 1.8},
        written={"topk_method": "noaux_tc", "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
    ),
    "deepseek-v3": Tiny(
        name="DeepseekV3",
        config={
            **LATENT,
            "q_lora_rank": 24,
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN,
        },
        written={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    ),
    "moonlight": Tiny(name="DeepseekV3", config={**LATENT, "q_lora_rank": None}),
}


def write_tiny(folder: Path, tiny: Tiny, *, dtype: str = "float32") -> Path:
    """Write a random model whose norms, biases and weights are so far from their initial values that errors show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{tiny.name}Config")(**tiny.config)
    model = getattr(transformers, f"{tiny.name}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn_like(tensor)
            if "norm" in name:
                tensor.copy_(1 + 0.2 * noise)
            elif "inv_freq" not in name:
                tensor.copy_(0.15 * noise)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tiny.written}))
    return folder
