"""Rules and keys that several families share."""

from asyncrl.models.families.family import Rule

LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_ATTENTION, _HF_ATTENTION = LAYER + "self_attention.", HF_LAYER + "self_attn."
_MLP, _HF_MLP = LAYER + "mlp.", HF_LAYER + "mlp."
_EXPERT, _HF_EXPERT = _MLP + "experts.local_experts.{expert}.", _HF_MLP + "experts.{expert}."
_SHARED, _HF_SHARED = _MLP + "shared_experts.", _HF_MLP + "shared_experts."


def _gated(megatron: str, hf: str) -> tuple[Rule, ...]:
    return (
        Rule(megatron + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight"), "pair"),
        Rule(megatron + "linear_fc2.weight", (hf + "down_proj.weight",), "columns"),
    )


ENDS = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "rows"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "rows"),
)
LAYER_NORMS = (
    Rule(LAYER + "input_layernorm.weight", (HF_LAYER + "input_layernorm.weight",)),
    Rule(LAYER + "pre_mlp_layernorm.weight", (HF_LAYER + "post_attention_layernorm.weight",)),
)
ATTENTION = (
    Rule(
        _ATTENTION + "linear_qkv.weight", tuple(f"{_HF_ATTENTION}{part}_proj.weight" for part in "qkv"), "rows", "heads"
    ),
    Rule(_ATTENTION + "linear_proj.weight", (_HF_ATTENTION + "o_proj.weight",), "columns"),
)
QKV_BIAS = (
    Rule(_ATTENTION + "linear_qkv.bias", tuple(f"{_HF_ATTENTION}{part}_proj.bias" for part in "qkv"), "rows", "heads"),
)
QK_NORMS = (
    Rule(_ATTENTION + "q_layernorm.weight", (_HF_ATTENTION + "q_norm.weight",)),
    Rule(_ATTENTION + "k_layernorm.weight", (_HF_ATTENTION + "k_norm.weight",)),
)
LATENT_ATTENTION = (
    Rule(_ATTENTION + "linear_q_proj.weight", (_HF_ATTENTION + "q_proj.weight",), "rows"),
    # SGLang 0.5.16 joins q_a_proj and kv_a_proj_with_mqa, and silently takes neither unless one bucket has both.
    Rule(_ATTENTION + "linear_q_down_proj.weight", (_HF_ATTENTION + "q_a_proj.weight",), sent_with_next=True),
    Rule(_ATTENTION + "q_layernorm.weight", (_HF_ATTENTION + "q_a_layernorm.weight",)),
    Rule(_ATTENTION + "linear_q_up_proj.weight", (_HF_ATTENTION + "q_b_proj.weight",), "rows", sent_with_next=True),
    Rule(_ATTENTION + "linear_kv_down_proj.weight", (_HF_ATTENTION + "kv_a_proj_with_mqa.weight",)),
    Rule(_ATTENTION + "kv_layernorm.weight", (_HF_ATTENTION + "kv_a_layernorm.weight",)),
    Rule(_ATTENTION + "linear_kv_up_proj.weight", (_HF_ATTENTION + "kv_b_proj.weight",), "rows"),
    Rule(_ATTENTION + "linear_proj.weight", (_HF_ATTENTION + "o_proj.weight",), "columns"),
)
DENSE = _gated(_MLP, _HF_MLP)
FUSED_DENSE = (
    Rule(_MLP + "linear_fc1.weight", (_HF_MLP + "gate_up_proj.weight",), "pair"),
    Rule(_MLP + "linear_fc2.weight", (_HF_MLP + "down_proj.weight",), "columns"),
)
EXPERTS = (Rule(_MLP + "router.weight", (_HF_MLP + "gate.weight",)), *_gated(_EXPERT, _HF_EXPERT))
EXPERT_BIAS = (Rule(_MLP + "router.expert_bias", (_HF_MLP + "gate.e_score_correction_bias",)),)
SHARED_EXPERTS = _gated(_SHARED, _HF_SHARED)

KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "ties_embeddings": "tie_word_embeddings",
}
BIASED_EXPERT_KEYS = {
    "num_experts": "n_routed_experts|num_local_experts",
    "num_chosen": "num_experts_per_tok",
    "ffn_hidden_size": "moe_intermediate_size",
    "weights_add_to_one": "norm_topk_prob",
    "num_shared": "n_shared_experts",
    "num_groups": "n_group",
    "num_chosen_groups": "topk_group",
    "weight_scale": "routed_scaling_factor",
    "num_dense_layers": "first_k_dense_replace",
}
"""The keys of DeepSeek's mixture of experts, which GLM-4.5 adopted.  It has a bias for the choice alone, groups, shared
experts, and dense layers at the start."""
