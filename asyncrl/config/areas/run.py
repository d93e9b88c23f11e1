"""The whole run."""

from dataclasses import dataclass, field

from asyncrl.config.areas.checkpoint import CheckpointConfig
from asyncrl.config.areas.cluster import ClusterConfig
from asyncrl.config.areas.data import DataConfig
from asyncrl.config.areas.evaluation import EvalConfig
from asyncrl.config.areas.failures import FailureConfig
from asyncrl.config.areas.hooks import HookConfig
from asyncrl.config.areas.model import ModelConfig
from asyncrl.config.areas.output import OutputConfig
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.rewards import RewardConfig
from asyncrl.config.areas.rollout import RolloutConfig
from asyncrl.config.areas.shape_flags import ShapeConfig
from asyncrl.config.areas.train import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole run.  Pass a function the area or the value that it needs, not this."""

    name: str
    """The TOML file's name without its suffix, or the model folder's name without a file."""
    model: ModelConfig
    shape: ShapeConfig
    cluster: ClusterConfig
    parallel: ParallelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    failures: FailureConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    evaluation: EvalConfig
    output: OutputConfig
    hooks: HookConfig = field(default_factory=HookConfig)
    sglang: dict[str, str | bool] = field(default_factory=dict)
    """The SGLang server's flags by name without ``--sglang-``; True is a flag without a value."""
    router: dict[str, str | bool] = field(default_factory=dict)
    """The router's flags by name without ``--router-``."""
