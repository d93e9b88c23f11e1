"""Model shapes by name.  The weights are random, since a benchmark depends on the shape alone."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_30B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: Mapping[str, dict[str, Any]] = {
    "tiny": QWEN3 | TINY,
    "tiny-moe": QWEN3 | EXPERTS | TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "0.6b": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "1.7b": QWEN3
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    # Qwen3-30B-A3B with 9 of its 48 layers: 6.2 billion parameters; and with 3.
    "moe-6b": QWEN3 | EXPERTS | QWEN3_30B | {"num_hidden_layers": 9},
    "moe-2b": QWEN3 | EXPERTS | QWEN3_30B | {"num_hidden_layers": 3},
}
"""Shapes by name.  All but the tiny ones have the dimensions of a Qwen3 model."""


def write_random(folder: Path, name: str, *, device: str, **changes: int) -> Path:
    """Write a checkpoint of the shape ``name`` with small random weights, without a tokenizer.

    ``changes`` replace values of its ``config.json``.
    """
    import torch
    from safetensors.torch import save_file

    config = {**SHAPES[name], **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    dtype = getattr(torch, config["torch_dtype"])
    tensors = {}
    generator = torch.Generator(device).manual_seed(0)
    for tensor, sizes in _tensors(config):
        if tensor.endswith("norm.weight"):
            tensors[tensor] = torch.ones(sizes, dtype=dtype)
        else:
            drawn = torch.empty(sizes, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
            tensors[tensor] = drawn.cpu()
    save_file(tensors, folder / "model.safetensors")
    return folder


def num_weights(name: str, *, active: bool) -> int:
    """The number of parameters; ``active``: only those in matrix products of one token, output layer included."""
    config = SHAPES[name]
    total = 0
    for tensor, sizes in _tensors(config):
        count = math.prod(sizes)
        if active and ".experts." in tensor:
            share = config["num_experts_per_tok"] / config["num_experts"]
            total += round(count * share)
        elif not active or tensor != "model.embed_tokens.weight":
            total += count
    if active and config["tie_word_embeddings"]:
        total += config["vocab_size"] * config["hidden_size"]
    return total


def _tensors(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of a Qwen3 checkpoint."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found += [
            (at + "input_layernorm.weight", (hidden,)),
            (at + "self_attn.q_proj.weight", (queries, hidden)),
            (at + "self_attn.k_proj.weight", (keys, hidden)),
            (at + "self_attn.v_proj.weight", (keys, hidden)),
            (at + "self_attn.q_norm.weight", (head,)),
            (at + "self_attn.k_norm.weight", (head,)),
            (at + "self_attn.o_proj.weight", (hidden, queries)),
            (at + "post_attention_layernorm.weight", (hidden,)),
        ]
        if "num_experts" not in config:
            found += _mlp(at + "mlp.", hidden, config["intermediate_size"])
            continue
        found.append((at + "mlp.gate.weight", (config["num_experts"], hidden)))
        for expert in range(config["num_experts"]):
            found += _mlp(f"{at}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
    found.append(("model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        found.append(("lm_head.weight", (config["vocab_size"], hidden)))
    return found


def _mlp(at: str, hidden: int, inner: int) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (at + "gate_proj.weight", (inner, hidden)),
        (at + "up_proj.weight", (inner, hidden)),
        (at + "down_proj.weight", (hidden, inner)),
    ]
