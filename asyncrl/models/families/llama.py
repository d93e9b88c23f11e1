"""Llama 3, up to 3.3."""

from asyncrl.models.families import parts
from asyncrl.models.families.family import Family

LLAMA = Family(
    keys=parts.KEYS,
    absent={"head_dim": None, "tie_word_embeddings": False},
    only={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    rope_types=("default", "llama3"),
    rules=(*parts.ENDS, *parts.LAYER_NORMS, *parts.ATTENTION, *parts.DENSE),
)
