"""Layers that megatron-core has only with TransformerEngine, or not at all.

Shape letters: T tokens, H hidden size, E experts of this rank, F inner size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
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
        name="megatron.core.transformer.moe.experts.SequentialMLP.forward",
        parameters=("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.moe.experts.SequentialMLP", attributes=("local_experts",), used_in=__name__
    ),
    Internal(
        name="torch.nn.functional.grouped_mm", parameters=("mat_a", "mat_b"), keywords=("offs",), used_in=__name__
    ),
)
"""Names that may change with the library: see docs/internals.md."""

LATENT_NORM_EPS = 1e-6
"""Of the norms within latent attention: DeepSeek's code, and transformers', ignore ``rms_norm_eps`` there."""


class RMSNorm(torch.nn.RMSNorm):
    """torch's, with the mark that makes Megatron add up gradients over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class AddNormed(torch.nn.Module):
    """Adds the norm of what a layer computed to the residual; stands where Megatron would add it as it is."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """The function that adds; there is neither a bias nor dropout."""
        return lambda output, residual, dropout: residual + self.norm(output[0])


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron's, also without a query vector of low rank, and with the narrow projections whole on every rank."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.linear_kv_down_proj = _Whole(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _Whole(config, config.q_lora_rank)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Megatron's own answer needs TransformerEngine where queries are not of low rank."""
        linears = dict.fromkeys(("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"), ColumnParallelLinear)
        return {**linears, "q_layernorm": _latent_norm, "kv_layernorm": _latent_norm}


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts, all in one product per matrix instead of one after the other.

    Megatron's own that does so needs TransformerEngine.
    """

    def forward(self, hidden_TH: Tensor, counts_E: Tensor, weights_T: Tensor) -> tuple[Tensor, None]:
        """Of tokens sorted by expert, ``counts_E`` of each; outputs are weighed by ``weights_T``."""
        ends_E = counts_E.to(hidden_TH.device).cumsum(0).to(torch.int32)
        inner_TF = F.grouped_mm(hidden_TH, self._stacked("linear_fc1"), offs=ends_E)
        gate_TF, up_TF = inner_TF.chunk(2, -1)
        weighed_TF = F.silu(gate_TF) * up_TF * weights_T.unsqueeze(-1)
        return F.grouped_mm(weighed_TF.to(hidden_TH.dtype), self._stacked("linear_fc2"), offs=ends_E), None

    def _stacked(self, name: str) -> Tensor:
        """Of every expert the same matrix, its inputs first."""
        return torch.stack([getattr(expert, name).weight for expert in self.local_experts]).transpose(1, 2)


class _Whole(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole.

    Split as Megatron's own is, the gradient of the rotary keys, which all heads share, would miss other ranks' heads.
    """

    def __init__(self, config: TransformerConfig, output_size: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(output_size, config.hidden_size, device=device, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The product, and the bias that is not there."""
        return F.linear(hidden, self.weight), None


def _latent_norm(*, config: TransformerConfig, hidden_size: int, eps: float) -> RMSNorm:
    return RMSNorm(config, hidden_size, LATENT_NORM_EPS)
