"""The model's shape in Megatron's flags, as scripts for Megatron give it."""

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.areas.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """The model's shape under Megatron's names.

    A value that tensor sizes depend on must equal config.json's; the others override it.
    """

    num_layers: Annotated[int | None, "Number of layers; must equal config.json's."] = None
    hidden_size: Annotated[int | None, "Hidden size; must equal config.json's."] = None
    ffn_hidden_size: Annotated[
        int | None, "FFN hidden size of an MLP that is not an expert; must equal config.json's."
    ] = None
    num_attention_heads: Annotated[int | None, "Number of attention heads; must equal config.json's."] = None
    num_query_groups: Annotated[int | None, "Number of KV heads; must equal config.json's."] = None
    kv_channels: Annotated[int | None, "Head dimension; must equal config.json's."] = None
    max_position_embeddings: Annotated[
        int | None, "Maximum context length of trainer and engines, in tokens. Default: config.json's."
    ] = None
    rotary_base: Annotated[
        float | None, "Base of the rotary frequencies (RoPE theta) in trainer and engines. Default: config.json's."
    ] = None
    rotary_percent: Annotated[
        float | None, "Fraction of each head that is rotated, 0 to 1, in trainer and engines. Default: config.json's."
    ] = None
    norm_epsilon: Annotated[float | None, "Epsilon of the norms in trainer and engines. Default: config.json's."] = None

    def __post_init__(self) -> None:
        share = self.rotary_percent
        refuse(
            at_least(self, 1, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
            + at_least(self, 1, "num_query_groups", "kv_channels", "max_position_embeddings")
            + above(self, 0, "rotary_base", "norm_epsilon")
            + must(share is None or 0 < share <= 1, f"rotary-percent must be above 0 and at most 1, got {share}")
        )
