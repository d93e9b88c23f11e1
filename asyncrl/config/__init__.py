"""The settings of a run, read from flags and TOML and checked before anything starts."""

from asyncrl.config.areas import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EvalConfig,
    FailureConfig,
    ModelConfig,
    OutputConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrackerConfig,
    TrainConfig,
)
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.areas.shape_flags import ShapeConfig
from asyncrl.config.flag_status import status_of
from asyncrl.config.load import Program, load_run
from asyncrl.config.passthrough import check_passthrough
from asyncrl.config.problems import missing_batches, missing_files
from asyncrl.config.resolved import flat, resolved

__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "EvalConfig",
    "FailureConfig",
    "ModelConfig",
    "OutputConfig",
    "ParallelConfig",
    "Program",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ShapeConfig",
    "TrackerConfig",
    "TrainConfig",
    "check_passthrough",
    "flat",
    "load_run",
    "missing_batches",
    "missing_files",
    "resolved",
    "status_of",
]
