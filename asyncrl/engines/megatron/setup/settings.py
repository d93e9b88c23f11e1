"""What a trainer rank is told.  Imports neither torch nor Megatron: the driver uses it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from asyncrl.config.areas import ModelConfig, TrainConfig
from asyncrl.config.parallel import ParallelConfig
from asyncrl.config.shape_flags import ShapeConfig

if TYPE_CHECKING:
    from asyncrl.algorithms.custom_functions import Custom

type Resolver = Callable[[], Custom]
"""Finds a user's functions.  It is called in the driver and again in every rank, so it must pickle; that it is handed
in keeps plug-ins out of the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a rank.  Only ``transformer_impl`` may still be ``auto``: see ``with_implementation``."""

    model: ModelConfig
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    """Of weights and activations; gradients and the optimizer are float32."""
    temperature: float
    """Logits are divided by it, as the engines do when they sample."""
    num_steps_per_rollout: int
    """Optimiser updates per training step."""
    use_rollout_logprobs: bool
    """Ratio against the log-probs of the engine that sampled, else against the trainer's at the start of the step."""
    timeout_s: float
    """For one collective operation."""
    save_timeout_s: float = 3600.0
    """For writing one checkpoint, until all ranks have written theirs."""
    row_tokens: int | None = None
    """Most tokens of a microbatch, over the context-parallel ranks that share it.  Default: ``max_tokens_per_gpu`` of
    each."""
    custom: Resolver | None = None
    """A user's own advantage or loss; None: neither."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if self.num_steps_per_rollout < 1:
            raise ValueError(f"num_steps_per_rollout must be at least 1, got {self.num_steps_per_rollout}")
