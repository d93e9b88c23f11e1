"""Attention over packed sequences.

Shape letters: T tokens of a packed microbatch (with context parallelism, of this rank's part of it), A attention heads,
D head dimension, K keys.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.megatron.model.attention_kernels import (
    Stretches,
    attended_by_kernel,
    attended_one_by_one,
    takes_kernel,
)
from asyncrl.engines.megatron.model.packing import Microbatch, part_of
from asyncrl.engines.megatron.model.rotary import RotaryAngles, rotated
from asyncrl.engines.megatron.model.routing import RowRoutes
from asyncrl.engines.megatron.setup.transfer import on_device
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.packed_seq_params.PackedSeqParams",
        keywords=("qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.transformer.attention.Attention",
        attributes=("core_attention", "packed_seq_params", "pg_collection", "softmax_scale"),
        used_in=__name__,
    ),
    Internal(name="megatron.core.process_groups_config.ProcessGroupCollection", attributes=("cp",), used_in=__name__),
    Internal(
        name="megatron.core.tensor_parallel.gather_from_sequence_parallel_region",
        parameters=("input_", "tensor_parallel_output_grad", "group"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """The fields of Megatron's ``PackedSeqParams``, and further ones that the layers here need."""

    stretches: Stretches | None = None
    rotary: RotaryAngles | None = None
    """Rotary angles; None: the layer rotates queries and keys itself (latent attention)."""
    routes: RowRoutes | None = None
    """Routes to replay; None: all routers choose for themselves."""


def packed_row(
    row: Microbatch,
    device: torch.device,
    rotary: RotaryAngles | None,
    rank: int,
    num_ranks: int,
    routes: RowRoutes | None = None,
) -> PackedRow:
    """Describe the microbatch ``row`` to the layers of one of ``num_ranks`` context-parallel ranks."""
    edges = on_device(row.edges, device)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=row.longest,
        max_seqlen_kv=row.longest,
        rotary=rotary,
        routes=routes,
        stretches=Stretches(token_edges=edges, key_edges=edges, longest_tokens=row.longest, longest_keys=row.longest)
        if num_ranks == 1
        else _shared_stretches(row, device, rank, num_ranks),
    )


def _shared_stretches(row: Microbatch, device: torch.device, rank: int, num_ranks: int) -> Stretches:
    """Build the stretches of a rank that holds two pieces of each sample.

    Each piece attends to its sample's tokens from the first one to the end of the piece.
    """
    everyones = np.concatenate([part_of(row, each, num_ranks).places_T for each in range(num_ranks)])
    gathered = np.empty_like(everyones)
    gathered[everyones] = np.arange(len(everyones))
    halves = np.diff(row.edges) // (2 * num_ranks)
    pieces = np.array([rank, 2 * num_ranks - 1 - rank])
    num_keys = ((pieces + 1) * halves[:, None]).ravel()
    starts = np.repeat(row.edges[:-1], 2)
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, num_keys, strict=True)])
    return Stretches(
        token_edges=on_device(_edges(np.repeat(halves, 2)), device),
        key_edges=on_device(_edges(num_keys), device),
        longest_tokens=int(halves.max()),
        longest_keys=int(num_keys.max()),
        key_places=on_device(gathered[places], device),
    )


def _edges(sizes: NDArray[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sequence of a packed microbatch.

    Megatron's local attention, without TransformerEngine, refuses packed sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._sharing_tokens = pg_collection.cp

    def forward(
        self,
        query_TAD: Tensor,
        key_TAD: Tensor,
        value_TAD: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedRow,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attended values, T x (A * D): the heads are concatenated."""
        rotary, stretches = packed_seq_params.rotary, packed_seq_params.stretches
        assert stretches is not None, "packed_seq_params must come from packed_row"
        if rotary is not None:
            query_TAD, key_TAD = rotated(query_TAD, rotary), rotated(key_TAD, rotary)
        key_KAD, value_KAD = self._seen(key_TAD, stretches), self._seen(value_TAD, stretches)
        attend = attended_by_kernel if takes_kernel(query_TAD) else attended_one_by_one
        return attend(query_TAD, key_KAD, value_KAD, stretches, self.scale).flatten(1)

    def _seen(self, own_TAD: Tensor, stretches: Stretches) -> Tensor:
        """Select the keys or values that each stretch attends to.

        The backward pass sums their gradients over all context-parallel ranks that attended to them.
        """
        if stretches.key_places is None:
            return own_TAD
        whole: Tensor = gather_from_sequence_parallel_region(own_TAD.contiguous(), group=self._sharing_tokens)
        return whole.index_select(0, stretches.key_places)
