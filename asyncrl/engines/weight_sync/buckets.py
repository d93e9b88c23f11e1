"""What is sent at once in a weight update."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Tensors that travel as one flat buffer of bytes, in this order, under their Hugging Face names."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """As torch names them, without the module: float32, bfloat16."""
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
