"""The whole run."""

from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.areas.checkpoint import CheckpointConfig
from asyncrl.config.areas.cluster import ClusterConfig
from asyncrl.config.areas.data import DataConfig
from asyncrl.config.areas.episodes import EpisodeConfig
from asyncrl.config.areas.evaluation import EvalConfig, EvalEntry
from asyncrl.config.areas.failures import FailureConfig
from asyncrl.config.areas.hooks import HookConfig
from asyncrl.config.areas.model import ModelConfig
from asyncrl.config.areas.output import DebugConfig, OutputConfig, TrackerConfig
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.rewards import RewardConfig
from asyncrl.config.areas.rollout import RolloutConfig
from asyncrl.config.areas.shape_flags import ShapeConfig
from asyncrl.config.areas.train import TrainConfig

FlagWords = str | bool | tuple[str, ...]
"""The value of a flag that is not a setting: one word, several words, or True for a flag without a value."""


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
    episodes: EpisodeConfig
    reward: RewardConfig
    failures: FailureConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    evaluation: EvalConfig
    hooks: HookConfig
    output: OutputConfig
    trackers: TrackerConfig
    debug: DebugConfig = field(default_factory=DebugConfig)
    eval_entries: tuple[EvalEntry, ...] = ()
    """The sets in the file of ``--eval-config``, as they were when the run was loaded."""
    sglang: dict[str, FlagWords] = field(default_factory=dict)
    """The SGLang server's flags by name without ``--sglang-``."""
    router: dict[str, FlagWords] = field(default_factory=dict)
    """The router's flags by name without ``--router-``."""
    foreign: dict[str, FlagWords] = field(default_factory=dict)
    """The flags of slime and Megatron that are accepted without a setting, by name."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """The keys of ``--custom-config-path`` that are not settings, and their values."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Lines for the user: flags that are true anyway or have no effect, and settings that follow from others."""
