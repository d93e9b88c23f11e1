"""What one family of models looks like in a checkpoint: where its numbers stand, which tensors make which weight.

A weight is one of Megatron's tensors, a tensor one of the checkpoint's.  Imports neither torch nor Megatron.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One weight of Megatron's and the tensors that it is made of."""

    megatron: str
    """Name, with ``{layer}`` and ``{expert}`` for its numbers."""
    hf: tuple[str, ...]
    split: Literal["whole", "rows", "pair", "columns"] = "whole"
    """What a tensor-parallel rank has: everything, some rows, the same rows of both halves, or some columns."""
    layout: Literal["stacked", "heads"] = "stacked"
    """``stacked``: one under the other; ``heads``: queries, keys and values, interleaved by query group."""
    sent_with_next: bool = False
    """It goes to the engines in one bucket with the model's next weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.  A key is one of ``config.json``; of keys with ``|`` between them, the first that is there."""

    keys: Mapping[str, str]
    """Field of ModelShape to key."""
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of ExpertShape to key; empty for a dense model."""
    latent_keys: Mapping[str, str] = field(default_factory=dict)
    """Field of LatentShape to key; empty without multi-head latent attention."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelShape that the architecture decides, not its ``config.json``."""
    expert_always: Mapping[str, Any] = field(default_factory=dict)
    """The same of ExpertShape."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Keys that may be absent or null, with what transformers takes then."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the mathematics, with the one value that is supported; an absent key has it."""
    rope_types: tuple[str, ...] = ("default",)
    rules: tuple[Rule, ...]
    """Every weight that the architecture can have; a model without experts, say, has no use for some."""
