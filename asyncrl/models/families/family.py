"""The description of a model family: the keys of its ``config.json``, and the tensors that make up each weight.

Here a weight is one of Megatron's tensors, a tensor one of the checkpoint's.  Imports neither torch nor Megatron.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Rule:
    """One of Megatron's weights and the tensors that it is made of."""

    megatron: str
    """The weight's name, with ``{layer}`` and ``{expert}`` for its numbers."""
    hf: tuple[str, ...]
    split: Literal["whole", "rows", "pair", "columns"] = "whole"
    """The part on a tensor-parallel rank: everything, some rows, the same rows of both halves, or some columns."""
    layout: Literal["stacked", "heads"] = "stacked"
    """``stacked``: tensors one below the other; ``heads``: queries, keys and values, interleaved by query group."""
    sent_with_next: bool = False
    """Whether the weight is sent to the engines in one bucket with the model's next weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    A key is a key of ``config.json``.  If ``|`` separates several keys, the first one present counts.
    """

    keys: Mapping[str, str]
    """The key of each field of ModelShape."""
    expert_keys: Mapping[str, str] = field(default_factory=dict)
    """The key of each field of ExpertShape; empty for a dense model."""
    latent_keys: Mapping[str, str] = field(default_factory=dict)
    """The key of each field of LatentShape; empty without multi-head latent attention."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ModelShape that the architecture decides, not its ``config.json``."""
    expert_always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ExpertShape that the architecture decides."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Keys that may be absent or null, with the values that transformers then uses."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that change the mathematics, with the only supported value.  An absent key has that value."""
    rope_types: tuple[str, ...] = ("default",)
    rules: tuple[Rule, ...]
    """Rules for all weights that the architecture can have; a model without experts, for example, lacks some."""
