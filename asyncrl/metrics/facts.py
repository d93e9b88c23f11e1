"""What a stage can say about itself, as frozen snapshots; the reporter turns them into numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.metrics.length_bias import LengthStats
from asyncrl.types import Batch, EvalReport, TrainReport, UpdateReport, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Where every generated token of the run went.  ``generated`` is the sum of all the others, always."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    """In a trained group, left out of its loss."""
    filtered: int = 0
    """In a group that the filter dropped."""
    stale: int = 0
    """Too old to train on."""
    failed: int = 0
    """In a group that failed."""
    held: int = 0
    """In groups in flight, buffered, or in the batch being trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Where every admitted group of the run went.  ``admitted`` is the sum of all the others, always."""

    admitted: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0
    """Admitted and not yet scored."""
    partial: int = 0
    """Interrupted, waiting to go on."""
    buffered: int = 0
    """Scored and kept, waiting for a batch."""
    training: int = 0
    """In the batch being trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What the scheduler holds now; to look changes nothing."""

    tokens: TokenCounts
    groups: GroupCounts
    filter_reasons: Mapping[str, int]
    """Groups dropped by the filter, by its reason, over the whole run."""
    samples_in_flight: int
    """Slots in use."""
    slots: int
    """Slots in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats(Gauges):
    """What it holds after a step, and what it has learnt."""

    acceptance: float
    """Share of groups that the filter kept, over its last verdicts; 1 before the first."""
    returned: int
    """Prompts of stale groups that wait to be started again."""
    retries: int
    """Attempts after a failure, over the whole run."""
    aborts: int
    """Attempts that a weight update ended, over the whole run."""
    slot_limit: int
    """Slots that may be used now."""
    weights: Weights
    """What the engines serve."""
    lengths: LengthStats
    """Of samples started, trained and dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One training step, from the moment the trainer was free to the moment it is free again."""

    batch: Batch
    report: TrainReport
    update: UpdateReport | None
    """The weight update that followed this step, if one was due."""
    evaluation: EvalReport | None
    """An evaluation that finished since the last step."""
    scheduler: SchedulerStats
    """After the step."""
    trainer_waited_s: float
    """For a batch."""
    engines_idle_s: float
    """With no sample in flight at all, within this step."""
    train_s: float
    """Training, seen from the controller."""
    late_update_s: float
    """Training was over, and the update before it or the engines' log-probs of the same tokens were not."""
    step_s: float
    """The whole step: waiting, training, taking the weights."""
    loop_lag_ms: float
    """Longest delay of the controller's event loop."""
    logprob_diff: float | None
    """Mean absolute difference between engine and trainer log-probs of the same tokens under the same weights; None
    when the engines serve other weights than the trainer held."""
    update_wait_s: float | None = None
    """Training waited for its weights to be copied, or sent, for the update after this step."""
    checkpoint_s: float | None = None
    """For the copy of a checkpoint that follows this step, and for the one before to be written; None without one."""
