"""Parameter counts of a model, part by part.  Plain arithmetic on its shape; imports neither torch nor Megatron."""

from dataclasses import dataclass

from asyncrl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Parameter counts of some weights, by the ranks that split them."""

    split: int = 0
    """Parameters that tensor-parallel ranks split."""
    whole: int = 0
    """Parameters on every tensor-parallel rank: norms, the router, the narrow projections of latent attention."""
    experts: int = 0
    """Parameters that expert-parallel and expert-tensor-parallel ranks split."""

    def __add__(self, other: "Size") -> "Size":
        return Size(
            split=self.split + other.split, whole=self.whole + other.whole, experts=self.experts + other.experts
        )

    def __sub__(self, other: "Size") -> "Size":
        return Size(
            split=self.split - other.split, whole=self.whole - other.whole, experts=self.experts - other.experts
        )

    @property
    def total(self) -> int:
        """The number of all these parameters, without any split."""
        return self.split + self.whole + self.experts


def layer_size(shape: ModelShape, layer: int) -> Size:
    """Count the parameters of one layer; ``layer`` counts from 0."""
    hidden, norms = shape.hidden_size, 4 if shape.has_output_norms else 2
    attention = attention_size(shape)
    experts = shape.experts
    if experts is None or layer < experts.num_dense_layers:
        return attention + Size(split=3 * hidden * shape.ffn_hidden_size, whole=norms * hidden)
    each = 3 * hidden * experts.ffn_hidden_size
    return attention + Size(
        split=experts.num_shared * each,
        whole=norms * hidden + experts.num_experts * (hidden + int(experts.has_bias)),
        experts=experts.num_experts * each,
    )


def attention_size(shape: ModelShape) -> Size:
    """Count the parameters of the attention in one layer."""
    return _latent_attention(shape) if shape.latent else _attention(shape)


def vocabulary_size(shape: ModelShape) -> Size:
    """Count the parameters of the embedding, or of the output layer."""
    return Size(split=shape.vocab_size * shape.hidden_size)


def model_size(shape: ModelShape) -> Size:
    """Count all parameters that are trained."""
    size = vocabulary_size(shape) + Size(whole=shape.hidden_size)
    if not shape.ties_embeddings:
        size += vocabulary_size(shape)
    for layer in range(shape.num_layers):
        size += layer_size(shape, layer)
    return size


def fp8_size(shape: ModelShape) -> Size:
    """Count the parameters that FP8 checkpoints have in FP8: the layers' matrices without norms, biases and routers."""
    size = Size()
    for layer in range(shape.num_layers if shape.fp8_block else 0):
        size += layer_size(shape, layer) - _unquantised(shape, layer)
    return size


def sent_bytes(shape: ModelShape, weight_bytes: int) -> int:
    """Return the bytes of all weights sent to the engines, with ``weight_bytes`` for each parameter not in FP8."""
    in_fp8 = fp8_size(shape).total
    return (model_size(shape).total - in_fp8) * weight_bytes + round(in_fp8 * fp8_bytes(shape))


def fp8_bytes(shape: ModelShape) -> float:
    """Return the bytes of a parameter in FP8, with its share of the block's float32 scale."""
    rows, columns = shape.fp8_block or (1, 1)
    return 1 + 4 / (rows * columns)


def _unquantised(shape: ModelShape, layer: int) -> Size:
    """Count the parameters of one layer that are not in FP8: those outside matrices, and the router's."""
    hidden, experts, latent = shape.hidden_size, shape.experts, shape.latent
    size = Size(whole=(4 if shape.has_output_norms else 2) * hidden)
    if latent is not None:
        size += Size(whole=latent.key_value_rank + (latent.query_rank or 0))
    else:
        joined = (shape.num_heads + 2 * shape.num_query_groups) * shape.head_dim
        size += Size(split=joined * int(shape.has_qkv_bias), whole=2 * shape.head_dim * int(shape.has_qk_norms))
    if experts is None or layer < experts.num_dense_layers:
        return size
    return size + Size(whole=experts.num_experts * (hidden + int(experts.has_bias)))


def _attention(shape: ModelShape) -> Size:
    queries = shape.num_heads * shape.head_dim
    joined = queries + 2 * shape.num_query_groups * shape.head_dim
    return Size(
        split=shape.hidden_size * (joined + queries) + joined * int(shape.has_qkv_bias),
        whole=2 * shape.head_dim * int(shape.has_qk_norms),
    )


def _latent_attention(shape: ModelShape) -> Size:
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_heads
    assert latent is not None, "asked for by the caller"
    queries = heads * (latent.plain_dim + latent.rotary_dim)
    narrow = latent.key_value_rank
    size = Size(
        split=narrow * heads * (latent.plain_dim + latent.value_dim) + heads * latent.value_dim * hidden,
        whole=hidden * (narrow + latent.rotary_dim) + narrow,
    )
    if latent.query_rank is None:
        return size + Size(split=hidden * queries)
    return size + Size(split=latent.query_rank * queries, whole=(hidden + 1) * latent.query_rank)
