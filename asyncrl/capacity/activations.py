"""What a layer keeps of each token until the backward pass.  Imports neither torch nor Megatron.

Counted in numbers of the run's dtype, from what the modules' backward passes use:

    residual   what the two norms read, and what they give to the matrices behind them
    attention  queries, keys and values as the matrix made them; the turned ones and the result, which the kernel uses
    mlp        gate and up (2F), silu(gate), up, and their product, which the last matrix reads: 5F

Experts keep the tokens that were sent to them, and a copy of their stacked weights (``layers.GroupedExperts``).
Scores of routers, sums of squares and the like are left out: less than a hundredth.
"""

from dataclasses import dataclass

from asyncrl.config.parallel import ParallelConfig
from asyncrl.models.shape import ModelShape
from asyncrl.models.sizes import layer_size

MLP_COPIES = 5
"""Of the inner numbers of an MLP or expert, see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Numbers that one rank keeps of one layer."""

    residual: float
    norms: float
    """What the norms gave."""
    attention: float
    latent_up: float = 0.0
    """The part of ``attention`` that latent attention can compute again from its narrow vectors."""
    mlp: float
    """Of the MLP, or of experts and shared experts."""

    @property
    def total(self) -> float:
        """With nothing computed again."""
        return self.residual + self.norms + self.attention + self.mlp


def layer_kept(shape: ModelShape, layer: int, parallel: ParallelConfig, num_tokens: float) -> Kept:
    """Of layer ``layer``, where the rank has ``num_tokens`` of a microbatch and shares them with its tensor-parallel
    ranks; tokens are taken to spread evenly over experts.
    """
    tokens = num_tokens / parallel.tensor_model_parallel_size
    hidden, experts = shape.hidden_size, shape.experts
    latent_up = _latent_up(shape) if shape.latent else 0
    attention = _latent_attention(shape) if shape.latent else _attention(shape, parallel.context_parallel_size)
    if experts is None or layer < experts.num_dense_layers:
        mlp = tokens * MLP_COPIES * shape.ffn_hidden_size
    else:
        each = parallel.num_expert_tensor_ranks
        sent = hidden + MLP_COPIES * experts.ffn_hidden_size / each
        shared = MLP_COPIES * experts.num_shared * experts.ffn_hidden_size
        mlp = tokens * (experts.num_chosen * each * sent + shared) + stacked(shape, layer, parallel)
    return Kept(
        residual=tokens * hidden * (4 if shape.has_output_norms else 2),
        norms=tokens * hidden * 2,
        attention=tokens * (attention + latent_up),
        latent_up=tokens * latent_up,
        mlp=mlp,
    )


def stacked(shape: ModelShape, layer: int, parallel: ParallelConfig) -> float:
    """Numbers of the experts' weights that this rank has of a layer."""
    sharing = parallel.num_expert_tensor_ranks * parallel.expert_model_parallel_size
    return layer_size(shape, layer).experts / sharing


def _attention(shape: ModelShape, num_sharing: int) -> float:
    """Per token; ``num_sharing`` context-parallel ranks."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_query_groups * shape.head_dim
    made = queries + 2 * keys
    read = queries if shape.has_qk_norms else 0  # the norm of queries reads a copy
    # Alone, a rank keeps turned keys, and values in ``made``; else both as gathered: on average half of all tokens'.
    seen = keys if num_sharing == 1 else keys * (2 * num_sharing + 1)
    return made + read + 2 * queries + seen


def _latent_attention(shape: ModelShape) -> float:
    """Per token, without what can be computed again from the narrow vectors."""
    latent = shape.latent
    assert latent is not None, "asked for by the caller"
    head = latent.plain_dim + latent.rotary_dim
    narrow = 2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rotary_dim
    return narrow + shape.num_heads * (2 * head + latent.value_dim)  # values and result as wide as keys; the result cut


def _latent_up(shape: ModelShape) -> float:
    """Turned queries and keys, per token."""
    latent = shape.latent
    assert latent is not None, "asked for by the caller"
    return shape.num_heads * 2 * (latent.plain_dim + latent.rotary_dim)
