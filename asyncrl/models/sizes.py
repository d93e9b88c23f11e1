"""How many numbers a model has, part by part.  Plain arithmetic on its shape; imports neither torch nor Megatron."""

from dataclasses import dataclass

from asyncrl.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Numbers of some weights, by who shares them."""

    split: int = 0
    """Shared by tensor-parallel ranks."""
    whole: int = 0
    """On each of them: norms, the router, the narrow projections of latent attention."""
    experts: int = 0
    """Shared by expert-parallel and expert-tensor-parallel ranks."""

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
        """Of the whole model."""
        return self.split + self.whole + self.experts


def layer_size(shape: ModelShape, layer: int) -> Size:
    """Of one layer, counted from 0."""
    hidden, norms = shape.hidden_size, 4 if shape.has_output_norms else 2
    attention = _latent_attention(shape) if shape.latent else _attention(shape)
    experts = shape.experts
    if experts is None or layer < experts.num_dense_layers:
        return attention + Size(split=3 * hidden * shape.ffn_hidden_size, whole=norms * hidden)
    each = 3 * hidden * experts.ffn_hidden_size
    return attention + Size(
        split=experts.num_shared * each,
        whole=norms * hidden + experts.num_experts * (hidden + int(experts.has_bias)),
        experts=experts.num_experts * each,
    )


def vocabulary_size(shape: ModelShape) -> Size:
    """Of the embedding, or of the output layer."""
    return Size(split=shape.vocab_size * shape.hidden_size)


def model_size(shape: ModelShape) -> Size:
    """Of everything that is trained."""
    size = vocabulary_size(shape) + Size(whole=shape.hidden_size)
    if not shape.ties_embeddings:
        size += vocabulary_size(shape)
    for layer in range(shape.num_layers):
        size += layer_size(shape, layer)
    return size


def fp8_size(shape: ModelShape) -> Size:
    """Of what checkpoints in fp8 have in fp8: matrices of the layers, but not norms, biases and routers."""
    size = Size()
    for layer in range(shape.num_layers if shape.fp8_block else 0):
        size += layer_size(shape, layer) - _unquantised(shape, layer)
    return size


def sent_bytes(shape: ModelShape, weight_bytes: int) -> int:
    """Of all weights on their way to the engines: ``weight_bytes`` for each number that is not in fp8."""
    in_fp8 = fp8_size(shape).total
    return (model_size(shape).total - in_fp8) * weight_bytes + round(in_fp8 * fp8_bytes(shape))


def fp8_bytes(shape: ModelShape) -> float:
    """Of a number in fp8 and its part of its block's scale, in float32."""
    rows, columns = shape.fp8_block or (1, 1)
    return 1 + 4 / (rows * columns)


def _unquantised(shape: ModelShape, layer: int) -> Size:
    """Of one layer's weights those that are no matrices, and the router."""
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
