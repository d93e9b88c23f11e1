"""The settings of a run: one frozen dataclass per area.

A field's name, with ``-`` for ``_``, is its flag and its TOML key.  The string in its annotation is its help text.
slime's names and meanings hold wherever the feature exists.  ``__post_init__`` checks the range of each field.
``config/problems.py`` finds contradictions between fields and missing files; ``config/derived.py`` computes defaults
that depend on other areas.
"""

from asyncrl.config.areas.checkpoint import CheckpointConfig
from asyncrl.config.areas.cluster import ClusterConfig
from asyncrl.config.areas.data import DataConfig
from asyncrl.config.areas.episodes import EpisodeConfig
from asyncrl.config.areas.evaluation import EvalConfig
from asyncrl.config.areas.failures import FailureConfig
from asyncrl.config.areas.hooks import HookConfig
from asyncrl.config.areas.model import ModelConfig, TransformerImpl
from asyncrl.config.areas.output import DebugConfig, OutputConfig, Secret, TrackerConfig
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.rewards import RewardConfig
from asyncrl.config.areas.rollout import RolloutConfig
from asyncrl.config.areas.run import FlagWords, RunConfig
from asyncrl.config.areas.shape_flags import ShapeConfig
from asyncrl.config.areas.train import TrainConfig

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "DebugConfig",
    "EpisodeConfig",
    "EvalConfig",
    "FailureConfig",
    "FlagWords",
    "HookConfig",
    "ModelConfig",
    "OutputConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Secret",
    "ShapeConfig",
    "TrackerConfig",
    "TrainConfig",
    "TransformerImpl",
]
