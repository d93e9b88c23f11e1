"""The model's shape, for those who have it in Megatron's flags."""

from dataclasses import dataclass
from typing import Annotated

from asyncrl.config.ranges import above, at_least, must, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeConfig:
    """What config.json says of the model's shape, under Megatron's names.

    A number that tensors depend on must be that of config.json; the others go before it.
    """

    num_layers: Annotated[int | None, "Must be config.json's."] = None
    hidden_size: Annotated[int | None, "Must be config.json's."] = None
    ffn_hidden_size: Annotated[int | None, "Numbers in an MLP that is no expert; must be config.json's."] = None
    num_attention_heads: Annotated[int | None, "Must be config.json's."] = None
    num_query_groups: Annotated[int | None, "Heads of keys and values; must be config.json's."] = None
    kv_channels: Annotated[int | None, "Numbers in a head; must be config.json's."] = None
    max_position_embeddings: Annotated[
        int | None, "Longest context in tokens, of trainer and engines; default: config.json's."
    ] = None
    rotary_base: Annotated[
        float | None, "Base of the rotary frequencies (rope theta), of trainer and engines; default: config.json's."
    ] = None
    rotary_percent: Annotated[
        float | None, "Share of each head that positions turn, 0 to 1, of trainer and engines; default: config.json's."
    ] = None
    norm_epsilon: Annotated[float | None, "Epsilon of the norms, of trainer and engines; default: config.json's."] = (
        None
    )

    def __post_init__(self) -> None:
        share = self.rotary_percent
        refuse(
            at_least(self, 1, "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
            + at_least(self, 1, "num_query_groups", "kv_channels", "max_position_embeddings")
            + above(self, 0, "rotary_base", "norm_epsilon")
            + must(share is None or 0 < share <= 1, f"rotary-percent must be above 0 and at most 1, got {share}")
        )
