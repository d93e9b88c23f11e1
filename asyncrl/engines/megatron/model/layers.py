"""Layers that megatron-core has only with TransformerEngine, or not at all."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
        attributes=("sequence_parallel",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.transformer_layer.TransformerLayer",
        attributes=("mlp_bda", "self_attn_bda"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.multi_latent_attention.MLASelfAttention._resolve_qk_norm_config",
        parameters=("self", "submodules"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.multi_latent_attention.MLASelfAttention",
        attributes=(
            "linear_kv_down_proj",
            "linear_q_down_proj",
            "linear_q_proj",
            "linear_q_up_proj",
            "linear_kv_up_proj",
            "q_layernorm",
            "kv_layernorm",
        ),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.random.CheckpointWithoutOutput",
        parameters=("fp8",),
        is_exact=True,
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms within latent attention, where DeepSeek's code and transformers ignore ``rms_norm_eps``."""


def recompute_norms_without_fp8() -> None:
    """Let Megatron recompute norms without TransformerEngine.

    It passes no ``fp8``, whose default is False.  Its class takes any value but None for fp8, which TransformerEngine
    computes (megatron-core 0.19, tensor_parallel/random.py).
    """
    CheckpointWithoutOutput.__init__.__defaults__ = (None,)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that Megatron sums its gradients over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class AddNormed(torch.nn.Module):
    """A residual connection that normalises a layer's output before it adds it.

    It replaces Megatron's bias-dropout-add, which adds the output unchanged.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Return the function that adds; there is neither a bias nor dropout."""
        return lambda output, residual, dropout: residual + self.norm(output[0])


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's latent attention with its down projections replicated on every tensor-parallel rank.

    Queries may do without a low-rank projection.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_kv_down_proj = _Whole(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _Whole(config, config.q_lora_rank)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Choose projections and norms; Megatron's choice needs TransformerEngine where queries have no low rank."""
        linears = dict.fromkeys(("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"), ColumnParallelLinear)
        return {**linears, "q_layernorm": _latent_norm, "kv_layernorm": _latent_norm}


class _Whole(torch.nn.Module):
    """A linear layer that is replicated on every tensor-parallel rank.

    Megatron splits the layer.  All heads share the rotary keys, whose gradient on a rank would then lack the heads of
    other ranks.
    """

    def __init__(self, config: TransformerConfig, output_size: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(output_size, config.hidden_size, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the product, and None for the bias."""
        return F.linear(hidden, self.weight), None


def _latent_norm(*, config: TransformerConfig, hidden_size: int, eps: float) -> RMSNorm:
    return RMSNorm(config, hidden_size, LATENT_NORM_EPS)
