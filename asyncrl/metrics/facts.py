"""Facts about the stages of a run, as frozen snapshots; the reporter turns them into numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncrl.metrics.length_bias import LengthStats
from asyncrl.types import Batch, EvalReport, TrainReport, UpdateReport, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of the run by outcome.  ``generated`` is always the sum of the others."""

    generated: int = 0
    trained: int = 0
    masked: int = 0
    """Tokens of trained groups that were left out of the loss."""
    filtered: int = 0
    """Tokens of groups that the filter dropped."""
    stale: int = 0
    """Tokens too old to train on."""
    failed: int = 0
    """Tokens of groups that failed."""
    held: int = 0
    """Tokens of groups in flight, buffered, or in the batch being trained."""
    observed: int = 0
    """Tokens of observations in groups that were trained, or dropped after their score.  In no sum: nothing generated
    them."""
    trained_copies: int = 0
    """Tokens of turns that are in the loss a second time, which only trajectories of user code have.  In no sum."""
    lost: int = 0
    """Tokens of groups in flight when a run was killed that this one recovers; at least.  In no sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Groups of the run by state.  ``admitted`` is always the sum of the others."""

    admitted: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0
    """Groups admitted and not yet scored."""
    partial: int = 0
    """Interrupted groups that wait to resume."""
    buffered: int = 0
    """Groups scored and kept, waiting for a batch."""
    training: int = 0
    """Groups in the batch being trained."""
    quarantined: int = 0
    """Prompts of rows in quarantine, which were taken and started no group.  In no sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The scheduler's present state; reading it has no side effects."""

    tokens: TokenCounts
    groups: GroupCounts
    filter_reasons: Mapping[str, int]
    """Groups dropped by the filter over the whole run, by its reason."""
    samples_in_flight: int
    """Slots in use."""
    slots: int
    """Number of slots."""
    episodes_open: int | None = None
    """Episodes that were started and have not ended; None in a run without episodes."""
    waits_for: str | None = None
    """A line on who waits for whom while a service of the rewards is away and no group starts; None otherwise."""
    outage_s: float = 0.0
    """Seconds for which services of the training rewards were away, over the whole process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStats:
    """The training episodes of the run.  Seconds and ``sums`` are those of episodes that ended since the last step."""

    ended: Mapping[str, int]
    """Episodes so far by the reason of their end, see ``episodes.EpisodeEnd``."""
    tool_s: float
    """Seconds in tools and other user code."""
    engine_s: float
    """Seconds of engine calls, without waits for a slot."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums of ``EpisodeOutcome.metrics``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats(Gauges):
    """The scheduler's state and estimates after a step."""

    acceptance: float
    """Share of the groups that the filter kept among its last verdicts; 1 before the first."""
    returned: int
    """Prompts of stale groups that wait to start again."""
    retries: int
    """Attempts after a failure, over the whole run."""
    aborts: int
    """Attempts ended on purpose over the whole run, for a weight update or to give the trainer the GPUs."""
    slot_limit: int
    """Slots that may be used now."""
    weights: Weights
    """Weights that the engines serve."""
    lengths: LengthStats
    """Lengths of the samples started, trained and dropped."""
    episodes: EpisodeStats | None = None
    """None in a run without episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One training step, from the moment when the trainer became free to the moment when it is free again."""

    batch: Batch
    report: TrainReport
    update: UpdateReport | None
    """The weight update that followed this step, if any."""
    evaluation: EvalReport | None
    """The evaluation that finished since the last step, if any."""
    scheduler: SchedulerStats
    """The scheduler's state after the step."""
    trainer_waited_s: float
    """Seconds that the trainer waited for a batch."""
    engines_idle_s: float
    """Seconds of this step without any sample in flight."""
    train_s: float
    """Seconds of training, measured in the driver."""
    late_update_s: float
    """Seconds after training until the previous update and the engines' log-probs of the same tokens were complete."""
    step_s: float
    """Seconds of the whole step: waiting, training, and the snapshot of the weights."""
    loop_lag_ms: float
    """Longest delay of the driver's event loop, in milliseconds."""
    logprob_diff: float | None
    """Mean absolute difference between engine and trainer log-probs of the same tokens under the same weights.  None if
    the engines serve other weights than the trainer held."""
    engine_logprob_diffs: Mapping[int, float] = field(default_factory=dict)
    """The same difference for each of several engines, by the engine's number, in steps in which all were compared."""
    surprise_ratio: float | None = None
    """Negative log-prob of some prompts, divided by that of the same prompts with all ids off by one; None between two
    probes."""
    mismatch: Mapping[str, float] = field(default_factory=dict)
    """Differences between the log-probs of engines and trainer by metric name (``metrics/mismatch``)."""
    num_engines: int | None = None
    """Engines that get requests after the step; None if unknown."""
    num_slow_engines: int | None = None
    """Engines that were drained because they were slow, since the start; None if unknown."""
    update_wait_s: float | None = None
    """Seconds that training waited until its weights were copied, or sent, for the update after this step."""
    hooks_s: float | None = None
    """Seconds that training waited for the user's hooks between batch and trainer; None without hooks."""
    checkpoint_s: float | None = None
    """Seconds that training waited for the previous checkpoint to be written and the one after this step to be copied;
    None without a checkpoint."""
    num_trainer_restarts: int | None = None
    """Restarts of the trainer since the start; None if it is not restarted."""
    without_trainer_s: float | None = None
    """Seconds without a trainer since the start, from its loss to the end of each restart."""
