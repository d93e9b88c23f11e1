"""The model and its number format."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from asyncrl.config.areas.ranges import must, refuse

TransformerImpl = Literal["auto", "local", "transformer_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and its number format."""

    hf_checkpoint: Annotated[
        Path,
        "Model folder in Hugging Face format: config.json, tokenizer, safetensors. Block-FP8 checkpoints are served "
        "as is; the trainer starts from the dequantized weights, unless --load or --ref-load provides others.",
    ]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "Data type of weights and activations. auto is bfloat16 on GPUs and float32 on CPUs, where bfloat16 is 4-6 "
        "times slower.",
    ] = "auto"
    transformer_impl: Annotated[
        TransformerImpl,
        "Implementation of the trainer's layers: Megatron's own (local), or TransformerEngine's, which fuses norms "
        "and activations with adjacent operations, needs GPUs and must be installed. auto is TransformerEngine in "
        "bfloat16 where it is available, else local.",
    ] = "auto"
    seed: Annotated[int, "Random seed of the trainer and of sampling in the rollout engines."] = 1234

    def __post_init__(self) -> None:
        refuse(must(0 <= self.seed < 2**31, f"seed must be at least 0 and below 2**31, got {self.seed}"))
