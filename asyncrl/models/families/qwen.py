"""Qwen2.5 (whose architecture is called Qwen2), Qwen3 and Qwen3-MoE."""

from asyncrl.models.families import parts
from asyncrl.models.families.family import Family

_ONLY = {"hidden_act": "silu", "use_sliding_window": False}
_DENSE = (*parts.ENDS, *parts.LAYER_NORMS, *parts.ATTENTION, *parts.DENSE)

QWEN2 = Family(
    keys=parts.KEYS,
    always={"has_qkv_bias": True},
    absent={"head_dim": None, "tie_word_embeddings": False},
    only=_ONLY,
    rules=(*_DENSE, *parts.QKV_BIAS),
)
QWEN3 = Family(
    keys=parts.KEYS,
    always={"has_qk_norms": True},
    only={**_ONLY, "attention_bias": False},
    rules=(*_DENSE, *parts.QK_NORMS),
)
QWEN3_MOE = Family(
    keys=parts.KEYS,
    always=QWEN3.always,
    expert_keys={
        "num_experts": "num_experts|num_local_experts",  # before transformers 5, and since then
        "num_chosen": "num_experts_per_tok",
        "ffn_hidden_size": "moe_intermediate_size",
        "weights_add_to_one": "norm_topk_prob",
    },
    only={**QWEN3.only, "decoder_sparse_step": 1, "mlp_only_layers": []},
    rules=(*QWEN3.rules, *parts.EXPERTS),
)
