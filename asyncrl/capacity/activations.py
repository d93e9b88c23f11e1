"""The activations that a layer keeps for each token until the backward pass.  Imports neither torch nor Megatron.

The unit is one element of the run's dtype.  The modules' backward passes use:

    residual   the inputs of the two norms, and their outputs, which the next matrices read
    attention  the projected queries, keys and values; the rotated ones and the result, which the kernel uses
    mlp        gate and up (2F), silu(gate), up, and their product, which the last matrix reads: 5F
    experts    the tokens that were sent to them, gate and up (2F), and the product: 3F (``mixture_ops.swiglu``)

Scores of routers, sums of squares and the like are left out: they are less than a hundredth.
"""

from dataclasses import dataclass

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.models.shape import ModelShape
from asyncrl.models.sizes import layer_size

MLP_COPIES = 5
"""The number of tensors with the FFN hidden size that an MLP keeps, see above."""
EXPERT_COPIES = 3
"""The same number of an expert, whose activation is one kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Elements that one rank keeps of one layer."""

    residual: float
    norms: float
    """Outputs of the norms."""
    attention: float
    gathered: float = 0.0
    """The part of ``attention`` that context-parallel ranks gather, less one copy of the rank's own keys."""
    latent_up: float = 0.0
    """The part of ``attention`` that latent attention can recompute from its narrow vectors."""
    mlp: float
    """Elements of the MLP, or of experts and shared experts."""
    stacked: float = 0.0
    """Parameters of the layer's experts on one rank, whose gradient is in memory once in the backward pass."""

    @property
    def total(self) -> float:
        """The sum of all parts, without recomputation."""
        return self.residual + self.norms + self.attention + self.mlp


def layer_activations(shape: ModelShape, layer: int, parallel: ParallelConfig, num_tokens: float) -> LayerActivations:
    """Count the elements that a rank keeps of layer ``layer``.

    The rank has ``num_tokens`` of a microbatch, which its tensor-parallel ranks split.  Tokens are assumed to spread
    evenly over experts.
    """
    tokens = num_tokens / parallel.tensor_model_parallel_size
    hidden, experts = shape.hidden_size, shape.experts
    stacked = 0.0
    latent_up = _latent_up(shape) if shape.latent else 0
    attention = _latent_attention(shape) if shape.latent else _attention(shape, parallel.context_parallel_size)
    if experts is None or layer < experts.num_dense_layers:
        mlp = tokens * MLP_COPIES * shape.ffn_hidden_size
    else:
        each = parallel.num_expert_tensor_ranks
        sent = hidden + EXPERT_COPIES * experts.ffn_hidden_size / each
        shared = MLP_COPIES * experts.num_shared * experts.ffn_hidden_size
        mlp = tokens * (experts.num_chosen * each * sent + shared)
        stacked = _stacked(shape, layer, parallel)
    return LayerActivations(
        residual=tokens * hidden * (4 if shape.has_output_norms else 2),
        norms=tokens * hidden * 2,
        attention=tokens * (attention + latent_up),
        gathered=tokens * (0 if shape.latent else _gathered(shape, parallel.context_parallel_size)),
        latent_up=tokens * latent_up,
        mlp=mlp,
        stacked=stacked,
    )


def _stacked(shape: ModelShape, layer: int, parallel: ParallelConfig) -> float:
    """Count the parameters of a layer's experts that are on one rank."""
    sharing = parallel.num_expert_tensor_ranks * parallel.expert_model_parallel_size
    return layer_size(shape, layer).experts / sharing


def _attention(shape: ModelShape, num_sharing: int) -> float:
    """Count the elements per token, with ``num_sharing`` context-parallel ranks."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    made = queries + 2 * keys
    read = queries if shape.has_qk_norms else 0  # the norm of queries reads a copy
    # A rank alone keeps rotated keys, and values in ``made``.
    return made + read + 2 * queries + keys + _gathered(shape, num_sharing)


def _gathered(shape: ModelShape, num_sharing: int) -> float:
    """Count the elements of gathered keys and values per token of one of ``num_sharing`` ranks, less its own keys.

    Each rank keeps both on average for half of all tokens: ``2 * num_sharing + 1`` times its keys.
    """
    return 0 if num_sharing == 1 else 2 * num_sharing * shape.num_query_groups * shape.head_dim


def _latent_attention(shape: ModelShape) -> float:
    """Count the elements per token, without the elements of ``_latent_up``, which can be recomputed."""
    latent = shape.latent
    assert latent is not None, "asked for by the caller"
    head = latent.plain_dim + latent.rotary_dim
    narrow = 2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rotary_dim
    # Values and the result are as wide as keys; then the result is cut to ``value_dim``.
    return narrow + shape.num_heads * (2 * head + latent.value_dim)


def _latent_up(shape: ModelShape) -> float:
    """Count the elements of rotated queries and keys, per token."""
    latent = shape.latent
    assert latent is not None, "asked for by the caller"
    return shape.num_heads * 2 * (latent.plain_dim + latent.rotary_dim)
