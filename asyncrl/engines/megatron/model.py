"""The one place where a Megatron model is made.

Shape letters: T tokens of a packed microbatch, A attention heads, D numbers per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from asyncrl.engines.megatron.shape import ExpertShape, ModelShape


def build_model(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> GPTModel:
    """An untrained model on ``device``; its weights are whatever was in memory."""
    config = transformer_config(shape, device, dtype)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization=config.normalization
    )
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.ties_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    return model.to(device, dtype)  # without TransformerEngine norms are made in float32, whatever the config says


def transformer_config(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's words for ``shape``."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every parameter is read from the checkpoint
        calculate_per_token_loss=True,  # sums of gradients over ranks, no averages: the loss brings its own scale
        # Kernels of TransformerEngine or Apex, or compiled by torch, which needs a C++ compiler on a CPU.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **(_expert_settings(shape.experts) if shape.experts else {}),
    )


def _expert_settings(experts: ExpertShape) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_chosen,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        # Softmax over the chosen experts alone is softmax over all, rescaled to add up to 1.
        "moe_router_pre_softmax": not experts.weights_add_to_one,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence of a packed microbatch.

    Megatron's own without TransformerEngine refuses packed sequences.
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query_TAD: Tensor,
        key_TAD: Tensor,
        value_TAD: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> Tensor:
        """Attended values, heads side by side."""
        edges: Tensor = packed_seq_params.cu_seqlens_q
        if query_TAD.is_cuda and query_TAD.dtype != torch.float32:
            longest = packed_seq_params.max_seqlen_q
            out_TAD = varlen_attn(
                query_TAD, key_TAD, value_TAD, edges, edges, longest, longest, scale=self.scale, window_size=(-1, 0)
            )
            assert isinstance(out_TAD, Tensor)
        else:  # the kernel is neither for a CPU nor for float32
            out_TAD = self._one_by_one(query_TAD, key_TAD, value_TAD, edges.diff().tolist())
        return out_TAD.flatten(1)

    def _one_by_one(self, query_TAD: Tensor, key_TAD: Tensor, value_TAD: Tensor, lengths: list[int]) -> Tensor:
        heads_first = (torch.split(x.transpose(0, 1), lengths, dim=1) for x in (query_TAD, key_TAD, value_TAD))
        attended = [
            F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=True)
            for query, key, value in zip(*heads_first, strict=True)
        ]
        return torch.cat(attended, dim=1).transpose(0, 1)
