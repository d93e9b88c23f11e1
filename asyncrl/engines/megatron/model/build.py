"""Construction of Megatron models; no other module constructs one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from asyncrl.config.areas import TransformerImpl
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.model.attention import PackedAttention
from asyncrl.engines.megatron.model.experts import GroupedExperts
from asyncrl.engines.megatron.model.implementation import norm_keys
from asyncrl.engines.megatron.model.layers import AddNormed, LatentAttention, RMSNorm, recompute_norms_without_fp8
from asyncrl.engines.megatron.model.mixture import Mixture
from asyncrl.engines.megatron.model.rotary import RotaryAngles, frequencies, rotary_angles
from asyncrl.internals import Internal
from asyncrl.models.rope import Rope, YarnRope
from asyncrl.models.shape import ExpertShape, LatentShape, ModelShape

INTERNALS = (
    Internal(
        name="megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
        parameters=("config", "use_transformer_engine"),
        keywords=("normalization",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.models.gpt.moe_module_specs.get_moe_module_spec",
        keywords=("use_te", "num_experts"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.models.gpt.gpt_model.GPTModel",
        parameters=("config", "transformer_layer_spec"),
        keywords=(
            "vocab_size",
            "max_sequence_length",
            "pre_process",
            "post_process",
            "share_embeddings_and_output_weights",
            "position_embedding_type",
        ),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.transformer_block.TransformerBlockSubmodules",
        attributes=("layer_norm", "layer_specs"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.transformer_layer.TransformerLayerSubmodules",
        attributes=(
            "input_layernorm",
            "mlp",
            "mlp_bda",
            "pre_mlp_layernorm",
            "self_attention",
            "self_attn_bda",
            "sharded_state_dict_keys_map",
        ),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.attention.SelfAttentionSubmodules",
        attributes=("core_attention", "k_layernorm", "q_layernorm"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.multi_latent_attention.MLASelfAttentionSubmodules",
        attributes=("core_attention",),
        used_in=__name__,
    ),
    Internal(name="megatron.core.transformer.moe.moe_layer.MoESubmodules", attributes=("experts",), used_in=__name__),
    Internal(name="megatron.core.transformer.moe.router.TopKRouter", attributes=("expert_bias",), used_in=__name__),
    Internal(
        name="megatron.core.transformer.spec_utils.ModuleSpec",
        keywords=("module", "params"),
        attributes=("submodules",),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


def build_model(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    parallel: ParallelConfig | None = None,
    layers: TransformerImpl = "local",
) -> GPTModel:
    """Build this rank's part of an untrained model on ``device``; its weights are uninitialised memory.

    Megatron's process groups determine how the model is split.  ``parallel`` sets how many layers each pipeline stage
    has, and what the backward pass recomputes.
    """
    config = transformer_config(shape, device, dtype, parallel or ParallelConfig(), layers)
    recompute_norms_without_fp8()
    model = GPTModel(
        config,
        _spec(shape, config),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.ties_embeddings,
        position_embedding_type="none",  # attention rotates queries and keys itself, with ``rotary_angles``
    )
    model.rotary_angles = _rotary_angles(shape, device, dtype)
    model.to(device, dtype)  # without TransformerEngine, norms are created in float32 whatever the config says
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # the smallest float32 difference may decide which expert is chosen
            buffer.data = buffer.data.float()
    return model


def transformer_config(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, parallel: ParallelConfig, layers: TransformerImpl
) -> TransformerConfig:
    """Translate ``shape`` into Megatron's ``TransformerConfig``."""
    make = MLATransformerConfig if shape.latent else TransformerConfig
    is_fused = layers == "transformer_engine" and shape.latent is None  # latent attention is always local
    return make(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norms or shape.latent is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        rotary_interleaved=shape.interleaves_rope,  # read by latent attention
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every parameter is read from the checkpoint
        transformer_impl="transformer_engine" if is_fused else "local",
        use_te_activation_func=is_fused and shape.experts is None,  # experts are always local
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged: the loss is already scaled
        # Kernels of TransformerEngine or Apex, or compiled by torch, for which a CPU needs a C++ compiler.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **_parallel_settings(),
        **_memory_settings(parallel),
        **(_expert_settings(shape.experts, shape.num_layers) if shape.experts else {}),
        **(_latent_settings(shape.latent, shape.rope) if shape.latent else {}),
    )


def _spec(shape: ModelShape, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Build the layer specs of this pipeline stage."""
    is_fused = config.transformer_impl == "transformer_engine"
    block = _fused_block(config) if is_fused else _local_block(shape, config)
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        attention.submodules.core_attention = PackedAttention
        if parts.mlp.func is MoELayer:
            submodules = parts.mlp.keywords["submodules"]
            submodules.experts = GroupedExperts
            parts.mlp = partial(Mixture, submodules=submodules)
        if shape.has_output_norms:
            parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=AddNormed, params={"config": config})
    return block


def _local_block(shape: ModelShape, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Build the layer specs of Megatron's local implementation with the norms of this package."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        parts.sharded_state_dict_keys_map = norm_keys(
            has_experts=parts.mlp.func is MoELayer, is_latent=shape.latent is not None
        )
        if shape.latent:
            attention.module = LatentAttention
        elif shape.has_qk_norms:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    return block


def _fused_block(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Build TransformerEngine's layer specs with local experts.

    TransformerEngine's experts trained slower than ``GroupedExperts``.
    """
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    for layer in block.layer_specs:
        parts = layer.submodules
        if parts.mlp.func is MoELayer:
            parts.mlp = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
    return block


def _parallel_settings() -> dict[str, Any]:
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    pipeline = parallel_state.get_pipeline_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tensor,
        "sequence_parallel": tensor > 1,  # saves memory; Megatron's experts require it
        "pipeline_model_parallel_size": pipeline,
        "variable_seq_lengths": pipeline > 1,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "moe_token_dispatcher_type": "alltoall",  # variable lengths require it, with experts or without
    }


def _memory_settings(parallel: ParallelConfig) -> dict[str, Any]:
    """Choose the layers of each pipeline stage, and what the backward pass recomputes."""
    settings: dict[str, Any] = {
        "num_layers_in_first_pipeline_stage": parallel.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": parallel.decoder_last_pipeline_num_layers,
        "recompute_granularity": parallel.recomputes,
    }
    if parallel.recomputes == "full":
        settings["recompute_method"] = parallel.recompute_method or "uniform"
        settings["recompute_num_layers"] = parallel.recompute_num_layers or 1
    if parallel.recompute_modules:
        # The activation of experts keeps nothing that moe_act would free, and Megatron has it for its own experts.
        settings["recompute_modules"] = [each for each in parallel.recompute_modules if each != "moe_act"]
    return settings


def _expert_settings(experts: ExpertShape, num_layers: int) -> dict[str, Any]:
    grouped = experts.num_groups > 1
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_chosen,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_layer_freq": [int(layer >= experts.num_dense_layers) for layer in range(num_layers)],
        "moe_shared_expert_intermediate_size": experts.num_shared * experts.ffn_hidden_size or None,
        "moe_router_score_function": experts.scores,
        # A softmax over the chosen experts alone equals the softmax over all, rescaled to add up to 1.
        "moe_router_pre_softmax": not experts.weights_add_to_one,
        "moe_router_enable_expert_bias": experts.has_bias,
        "moe_router_bias_update_rate": 0.0,  # the bias stays as loaded: updating it would add one more difference
        "moe_router_num_groups": experts.num_groups if grouped else None,
        "moe_router_group_topk": experts.num_chosen_groups if grouped else None,
        "moe_router_topk_scaling_factor": experts.weight_scale,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }


def _latent_settings(latent: LatentShape, rope: Rope) -> dict[str, Any]:
    settings = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rotary_base": rope.theta,
    }
    if not isinstance(rope.scaling, YarnRope):
        return {**settings, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        **settings,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.scaling.factor,
        "original_max_position_embeddings": rope.scaling.original_positions,
        "beta_fast": rope.scaling.beta_fast,
        "beta_slow": rope.scaling.beta_slow,
        "mscale": rope.scaling.mscale,
        "mscale_all_dim": rope.scaling.mscale_all_dim,
    }


def _rotary_angles(
    shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], RotaryAngles | None]:
    """Build the function from token positions to rotary angles.

    It returns None where Megatron's latent attention rotates queries and keys itself.
    """
    if shape.latent:
        return lambda positions_T: None
    return partial(
        rotary_angles,
        frequencies_F=frequencies(shape.rope, shape.head_dim).to(device),
        dtype=dtype,
        interleaved=shape.interleaves_rope,
    )
