"""Attention over packed sequences.

Shape letters: T tokens of a packed microbatch, A attention heads, D numbers per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn


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
