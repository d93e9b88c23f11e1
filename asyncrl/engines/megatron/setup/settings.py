"""The settings of a trainer rank.  Imports neither torch nor Megatron, because the driver uses it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from asyncrl.config.areas import ModelConfig, TrainConfig
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.shape_flags import ShapeConfig

if TYPE_CHECKING:
    from asyncrl.algorithms.custom_functions import Custom

type Resolver = Callable[[], Custom]
"""A function that finds the user's functions.  The driver calls it, and so does every rank, so it must be picklable.
It is passed in, so that the engines do not import plug-ins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a trainer rank.  Only ``transformer_impl`` may still be ``auto``; see ``with_implementation``."""

    model: ModelConfig
    shape: ShapeConfig = field(default_factory=ShapeConfig)
    train: TrainConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    """The dtype of weights and activations.  Gradients and optimizer state are float32."""
    temperature: float
    """The sampling temperature.  Logits are divided by it, as in the engines."""
    num_steps_per_rollout: int
    """The number of optimizer updates per training step."""
    use_rollout_logprobs: bool
    """Whether the ratio is against the log-probs of the engine that sampled.  Otherwise it is against the trainer's
    log-probs at the start of the step."""
    timeout_s: float
    """The timeout of one collective operation, in seconds."""
    save_timeout_s: float = 3600.0
    """The timeout for writing one checkpoint, in seconds, until all ranks have written their shards."""
    row_tokens: int | None = None
    """The maximum number of tokens of a microbatch, summed over the context-parallel ranks that split it.  Default:
    ``max_tokens_per_gpu`` on each of them."""
    num_expert_parts: int = 1
    """The expert-parallel size of the engines.  Weight updates send the experts of each part in separate buckets."""
    lr_decay_iters: int = 1
    """The training step at which the decay of the learning rates ends."""
    reports_advantages: bool = False
    """Whether the report of a step has the advantages."""
    custom: Resolver | None = None
    """A resolver for the user's advantage or loss function; None if the user has neither."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if self.num_steps_per_rollout < 1:
            raise ValueError(f"num_steps_per_rollout must be at least 1, got {self.num_steps_per_rollout}")
