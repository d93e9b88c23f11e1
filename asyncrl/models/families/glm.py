"""GLM-4-0414 with GLM-Z1, GLM-4.5 with its successors up to 4.7, and GLM-4.7-Flash."""

from dataclasses import replace

from asyncrl.models.families import parts
from asyncrl.models.families.deepseek import DEEPSEEK_V3
from asyncrl.models.families.family import Family, Rule

_KEYS = {**parts.KEYS, "has_qkv_bias": "attention_bias"}
_ABSENT = {"head_dim": None, "tie_word_embeddings": False, "partial_rotary_factor": 0.5}

GLM4 = Family(
    keys=_KEYS,
    always={"interleaves_rope": True, "has_output_norms": True},
    absent={**_ABSENT, "attention_bias": True},
    only={"hidden_act": "silu"},
    rules=(
        *parts.ENDS,
        *parts.LAYER_NORMS,
        Rule(parts.LAYER + "self_attn_bda.norm.weight", (parts.HF_LAYER + "post_self_attn_layernorm.weight",)),
        Rule(parts.LAYER + "mlp_bda.norm.weight", (parts.HF_LAYER + "post_mlp_layernorm.weight",)),
        *parts.ATTENTION,
        *parts.QKV_BIAS,
        *parts.FUSED_DENSE,
    ),
)
GLM4_MOE = Family(
    keys={**_KEYS, "has_qk_norms": "use_qk_norm"},
    absent={**_ABSENT, "attention_bias": False, "use_qk_norm": False},
    expert_keys=parts.BIASED_EXPERT_KEYS,
    expert_always={"scores": "sigmoid", "has_bias": True},
    only={"hidden_act": "silu", "norm_topk_prob": True},
    rules=(
        *parts.ENDS,
        *parts.LAYER_NORMS,
        *parts.ATTENTION,
        *parts.QKV_BIAS,
        *parts.QK_NORMS,
        *parts.DENSE,
        *parts.EXPERTS,
        *parts.EXPERT_BIAS,
        *parts.SHARED_EXPERTS,
    ),
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    absent={**DEEPSEEK_V3.absent, "first_k_dense_replace": 1, "partial_rotary_factor": 1.0},
    only={**DEEPSEEK_V3.only, "partial_rotary_factor": 1.0},
    rope_types=("default",),
)
"""DeepSeek V3's attention and router with GLM's sizes and default rotary embedding."""
