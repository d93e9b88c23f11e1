"""DeepSeek V3 and R1, Moonlight and Kimi K2: one architecture in several sizes."""

from asyncrl.models.families import parts
from asyncrl.models.families.family import Family

DEEPSEEK_V3 = Family(
    keys={name: key for name, key in parts.KEYS.items() if name != "head_dim"},
    always={"head_dim": None},  # the heads of latent attention have three sizes
    latent_keys={
        "query_rank": "q_lora_rank",
        "key_value_rank": "kv_lora_rank",
        "plain_dim": "qk_nope_head_dim",
        "rotary_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
    },
    absent={"q_lora_rank": None, "tie_word_embeddings": False},
    expert_keys=parts.BIASED_EXPERT_KEYS,
    expert_always={"scores": "sigmoid", "has_bias": True},
    only={
        "hidden_act": "silu",
        "attention_bias": False,
        "norm_topk_prob": True,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": True,
    },
    rope_types=("default", "yarn"),
    rules=(
        *parts.ENDS,
        *parts.LAYER_NORMS,
        *parts.LATENT_ATTENTION,
        *parts.DENSE,
        *parts.EXPERTS,
        *parts.EXPERT_BIAS,
        *parts.SHARED_EXPERTS,
    ),
)
