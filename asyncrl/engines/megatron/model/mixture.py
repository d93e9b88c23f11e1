"""A layer of experts that permutes tokens by gathers (``mixture_ops``), around Megatron's router and exchange.

    one rank has all experts      route ─▶ permute ─▶ experts ─▶ unpermute
    several ranks share experts   route ─▶ permute ─▶ all-to-all ─▶ sort by expert ─▶ experts ─▶ ... back

With one rank the host never waits for the GPU.  With several it waits once, for the sizes of the exchange.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.engines.megatron.model.mixture_ops import RowOrder, order_of, order_of_chunks, permute, unpermute
from asyncrl.internals import Internal

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher"
INTERNALS = (
    Internal(
        name="megatron.core.transformer.moe.moe_layer.MoELayer",
        parameters=("config",),
        keywords=("submodules", "pg_collection"),
        attributes=(
            "combine_postprocess",
            "combine_preprocess",
            "dispatch_postprocess",
            "dispatch_preprocess",
            "token_combine",
            "token_dispatch",
        ),
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}.dispatch_preprocess",
        parameters=("self", "hidden_states", "routing_map", "probs"),
        is_exact=True,
        attributes=("before_permutation_1", "hidden_shape", "tokens_per_expert"),
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}.token_dispatch",
        parameters=("self", "permutated_local_input_tokens", "permuted_probs"),
        is_exact=True,
        attributes=("before_ep_alltoall",),
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}.dispatch_postprocess",
        parameters=("self", "global_input_tokens", "global_probs"),
        is_exact=True,
        attributes=("output_splits_tp", "num_global_tokens_per_local_expert"),
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}.combine_preprocess",
        parameters=("self", "hidden_states"),
        is_exact=True,
        attributes=("output_splits_tp",),
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}.combine_postprocess",
        parameters=("self", "permutated_local_input_tokens"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}.preprocess",
        parameters=("self", "routing_map"),
        attributes=("num_global_tokens_per_local_expert",),
        used_in=__name__,
    ),
    Internal(
        name=f"{_DISPATCHER}._maybe_dtoh_and_synchronize",
        parameters=("self", "point", "tokens_per_expert"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.gather_from_sequence_parallel_region",
        parameters=("input_",),
        keywords=("group", "output_split_sizes"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.tensor_parallel.reduce_scatter_to_sequence_parallel_region",
        parameters=("input_",),
        keywords=("group", "input_split_sizes"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


class Mixture(MoELayer):  # type: ignore[misc]
    """Megatron's layer of experts, with ``GatherDispatcher``."""

    def __init__(self, config: TransformerConfig, *args: Any, pg_collection: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        self.token_dispatcher = GatherDispatcher(
            self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=pg_collection
        )


class GatherDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Megatron's dispatcher with its permutations done by gathers.

    ``dispatch_postprocess`` returns the end of each expert's rows, not their count, on the device.
    """

    _order: RowOrder
    """This rank's tokens by expert, of all ranks."""
    _probs_dtype: torch.dtype
    _received: RowOrder | None = None
    """The received rows by expert of this rank; None with one expert."""
    _ends: Tensor
    """The end of each local expert's rows."""
    _chunks: Tensor | None = None
    """The number of received rows by sender and local expert."""

    @property
    def exchanges(self) -> bool:
        """Whether other ranks have experts, or parts of them."""
        return bool(self.ep_size > 1 or self.tp_size > 1)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Permute the tokens by expert, and prepare the exchange."""
        # Invariant: no tensor with a graph stays here, as Megatron's ``probs`` would.  Its graph holds the activations
        # of a pass that ran out of memory, and the repeated pass needs that memory.
        self.hidden_shape, self._probs_dtype = hidden_states.shape, probs.dtype
        self._order = order_of(routing_map, self.config.moe_router_topk)
        if self.exchanges:
            counts = self.preprocess(routing_map)
            self._ends = counts.cumsum(0).to(torch.int32)
            # Megatron would copy it to the host, which needs it no more.
            self._chunks = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None
            self.num_global_tokens_per_local_expert: Tensor | None = None
            # Invariant: every split that ``token_dispatch`` reads is copied to the host from here on.
            self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        rows_NH = permute(hidden_states.view(-1, self.hidden_shape[-1]), self._order)
        return rows_NH, self._order.weights(probs)

    def token_dispatch(self, permutated_local_input_tokens: Tensor, permuted_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the rows to the ranks of their experts."""
        if not self.exchanges:
            return permutated_local_input_tokens, permuted_probs
        sent: tuple[Tensor, Tensor] = super().token_dispatch(permutated_local_input_tokens, permuted_probs)
        return sent

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the received rows by expert."""
        if not self.exchanges:
            return global_input_tokens, self._order.ends_E, global_probs
        rows_NH, weights_N = global_input_tokens, global_probs
        if self.tp_size > 1:
            splits = self._tensor_splits()
            rows_NH, weights_N = (
                gather_from_sequence_parallel_region(each, group=self.tp_group, output_split_sizes=splits)
                for each in (rows_NH, weights_N)
            )
        if self.num_local_experts > 1:
            assert self._chunks is not None, "set with several experts"
            self._received = order_of_chunks(self._chunks, len(rows_NH))
            rows_NH = permute(rows_NH, self._received)
            weights_N = permute(weights_N, self._received)
        self.tokens_per_expert = self._chunks = None
        return rows_NH, self._ends, weights_N

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' results to the order in which their rows were received."""
        if not self.exchanges:
            return hidden_states
        if self._received is not None:
            hidden_states = unpermute(hidden_states, self._received)
        if self.tp_size > 1:
            # As Megatron does: parts of one expert on several ranks are added in the router's dtype, float32.
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self._probs_dtype), group=self.tp_group, input_split_sizes=self._tensor_splits()
            ).to(hidden_states.dtype)
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Send the results back to the ranks of their tokens."""
        if not self.exchanges:
            return hidden_states
        received: Tensor = super().token_combine(hidden_states, *args, **kwargs)
        return received

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Add up the results of each token's experts."""
        return unpermute(permutated_local_input_tokens, self._order).view(self.hidden_shape)

    def _tensor_splits(self) -> list[int] | None:
        splits = self.output_splits_tp
        return None if splits is None else list(splits.tolist())
