"""The parts of a run, and its plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.early_end import EarlyEnd
from asyncrl.pipeline.evaluation import Evaluates
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.protocols import (
    BatchPreparer,
    Checkpointer,
    GpuSharing,
    ResumableSource,
    Score,
    Trainer,
    TrainerProcesses,
    WeightUpdater,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The length of the run and the intervals of its updates, evaluations and checkpoints."""

    num_steps: int
    update_weights_interval: int | None
    """Steps between weight updates; None: the engines keep their weights."""
    eval_interval: int | None
    eval_before_train: bool
    temperature: float
    save_to: Path
    abort_for_updates: bool = False
    """Abort every request before an update and send it again with its tokens, instead of pausing it."""
    first_step: int = 0
    """Steps done by the run that this one resumes."""
    save_interval: int | None = None
    """Steps between checkpoints.  The last step is always followed by one."""
    skip_nonfinite_steps: int = 0
    """Batches in a row that are skipped if their loss or gradient is not finite."""
    save_interval_s: float | None = None
    """Seconds between checkpoints; one follows the step in which they have passed."""
    save_during_training: bool = True
    """Continue training while a checkpoint is written."""
    max_failed_saves: int = 3
    """Failed checkpoints in a row that end the run."""
    vocab_size: int | None = None
    """Ids that a token can have; None if unknown."""
    max_trainer_restarts: int = 0
    """Restarts of the trainer between two completed steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a run.  ``scheduler`` and ``evaluator`` share ``slots`` and ``serving``."""

    scheduler: Scheduler
    evaluator: Evaluates | None
    engine: RetryingEngine
    trainer: Trainer
    updater: WeightUpdater
    slots: Slots
    serving: ServingWeights
    timeline: Timeline
    loop_lag: LoopLag
    checkpointer: Checkpointer | None = None
    """None: no checkpoints are written."""
    hooks: BatchPreparer | None = None
    """User functions between a batch and the trainer."""
    source: ResumableSource | None = None
    """The user's data source; None if prompts are found again by epoch and row."""
    gpu_sharing: GpuSharing | None = None
    """None: trainer and engines have separate GPUs.  Otherwise the engines hold the GPUs when the run begins."""
    early_end: EarlyEnd = field(default_factory=EarlyEnd)
    num_serving: Callable[[], int] | None = None
    """Returns the number of engines that get requests; None if unknown."""
    scorers: Callable[[], Mapping[int, Score]] = dict
    """Returns ``score`` of each engine that gets requests, by the engine's number; empty if unknown."""
    num_slow: Callable[[], int] | None = None
    """Returns how often an engine was drained because it was slow; None if unknown."""
    trainer_processes: TrainerProcesses | None = None
    """The processes of the trainer's ranks; None if the run ends with them."""
