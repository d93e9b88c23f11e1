"""The unit of a weight update: tensors that are sent together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """The tensors of one flat buffer of bytes, in this order, with their Hugging Face names."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Names of torch's dtypes, without the module: float32, bfloat16."""
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    expert_part: int | None = None
    """The engines' expert part that holds these experts (``expert_parts``); None if every rank needs the bucket."""
