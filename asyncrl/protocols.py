"""The interfaces between packages.

``engines/fake.py`` has a fake of every class except LoadProbe, GroupObserver, HasDeadlines, AdmissionHold and the
function types (RewardFn, GroupRewardFn, KeepFn, PickFn, EvalFn, BatchHook and the native shapes of hooks).
``tests/contract/`` runs the same tests on the fake and the real RolloutEngine.
"""

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from asyncrl.types import (
    Batch,
    Chunk,
    EngineLoad,
    EvalOutcome,
    EvalReport,
    FinishReason,
    NewPrompt,
    Picked,
    Prompt,
    Request,
    Reward,
    Sample,
    ScoredGroup,
    SourceState,
    TrainReport,
    UpdateReport,
    Weights,
)


class RolloutEngine(Protocol):
    """Generates tokens for prompts.  Safe to call from many tasks at once."""

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """Sample one answer and call ``on_chunk`` with its tokens as they arrive, in order.

        Every token that counts as generated goes through ``on_chunk`` exactly once, also if this call raises.
        A weight update during the call does not end it.  Cancelling the caller aborts the request on the server.
        Returns FinishReason.ABORT after ``interrupt``.  Raises EngineTimeout, EngineLost or EngineRejected.
        """

    async def interrupt(self) -> None:
        """End every call of ``generate`` with FinishReason.ABORT; return once no call is in flight.

        By then each generated token has gone through ``on_chunk`` exactly once.  A request that finishes at the same
        moment keeps its own FinishReason.  The caller must begin no call before this returns.  Requests of other users
        of the same engines are not aborted.  Raises nothing: the calls on an engine that does not answer raise
        EngineLost.
        """

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """Return the log-probs of ``token_ids[start:]``, each given all tokens before it.

        They are computed at temperature 1 under the weights served now.
        Raises EngineTimeout, EngineLost or EngineRejected.
        """


type Score = Callable[[tuple[int, ...], int], Coroutine[Any, Any, tuple[float, ...]]]
"""``RolloutEngine.score`` of one server."""


class LoadProbe(Protocol):
    """Measures the load of the rollout engines."""

    async def loads(self) -> tuple[EngineLoad, ...]:
        """Return one load per engine that answered.  Raises nothing."""


class WeightUpdater(Protocol):
    """Publishes the trainer's weights to every engine."""

    async def snapshot(self) -> bool:
        """Take a snapshot of the trainer's weights for the next ``publish``.

        Returns True if the weights are copied and the trainer may continue at once.  Returns False if the trainer must
        wait until they are published.  Raises WeightUpdateFailed.
        """

    async def resnapshot(self) -> bool:
        """Reuse the last snapshot for the next ``publish``, without stopping the trainer.

        Returns False if the snapshot is gone.  Raises WeightUpdateFailed.
        """

    async def publish(self, weights: Weights) -> UpdateReport:
        """Return once every engine samples from the last snapshot, labelled ``weights``.

        Requests in flight are paused, not lost.  Cancelling during an update leaves the engines unusable.
        Raises UpdateInterrupted if the caller may publish again, WeightUpdateFailed if the failure is final.
        """

    async def wait_for_rejoined(self) -> None:
        """Wait until a restarted engine needs weights outside the regular schedule."""

    def trainer_restarted(self, address: str) -> None:
        """Note that the trainer's ranks were started again, on the host ``address``: they are in no group of engines.

        The next ``snapshot`` connects them.
        """


class GpuSharing(Protocol):
    """Time-sharing of the GPUs between trainer and engines:  engines ─▶ trainer ─▶ update ─▶ engines ─▶ ...

    Each call returns at once if its side already holds the GPUs.  Each raises GpuSharingFailed.
    """

    async def acquire_for_training(self) -> None:
        """Free the engines' weights and KV caches and restore the trainer's memory.  Engines must have no requests."""

    async def acquire_for_update(self) -> None:
        """Restore the engines' memory for weights; of the trainer's memory only its weights stay on the GPU."""

    async def acquire_for_generation(self) -> None:
        """Free the trainer's memory and restore the KV caches of the engines, which have new weights."""


class Trainer(Protocol):
    """Trains the model on batches."""

    async def train(self, batch: Batch) -> TrainReport:
        """Run one training step; the new weights stay in the trainer until they are published.

        The gradient depends only on the batch's content, not on its packing into microbatches.
        Raises NonFiniteLoss (weights unchanged) or TrainerFailed.
        """

    async def save(self, path: Path) -> None:
        """Write the trainer's weights to ``path`` in Hugging Face format.  Raises TrainerFailed."""


class TrainerProcesses(Protocol):
    """The processes of a trainer's ranks, which end and start together."""

    async def wait_until_lost(self) -> str:
        """Return the reason once a rank has died or does not answer."""

    async def find_lost(self) -> str | None:
        """Return the reason why the trainer is lost; None if every rank lives and answers."""

    async def restart(self) -> int:
        """End all ranks, and start them from this run's newest complete checkpoint, or else its first weights.

        Returns the training steps behind these weights.  Engines continue to generate.  A second call starts over.
        Raises ConfigError or LeaseLost if another attempt would fail as well, and any other named error if it may not.
        """

    def save_memory(self) -> str | None:
        """Have the ranks need less memory from their next start on.

        Returns the flags that stand for it; None if no memory can be saved any more.
        """


class Checkpointer(Protocol):
    """Writes the checkpoints from which another run can resume."""

    async def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """Copy the trainer's state after ``step`` steps and start writing it in the background.

        ``run`` is stored with it; it holds JSON values only.  A checkpoint can be loaded only once it is complete.
        Waits first for the previous checkpoint.  Raises CheckpointFailed, also for the previous checkpoint, LeaseLost
        if another run has taken the folder, or TrainerFailed.
        """

    async def check(self) -> None:
        """Raise CheckpointFailed if the checkpoint that is being written has failed; each failure is raised once.

        Does not wait for the checkpoint.  Raises TrainerFailed if the trainer does not answer.
        """

    async def finish(self) -> None:
        """Wait until no checkpoint is being written.  Raises CheckpointFailed, LeaseLost or TrainerFailed."""


class PromptSource(Protocol):
    """An endless source of prompts.  Every epoch is a new permutation, determined by the seed."""

    async def ready(self) -> None:
        """Wait until ``take`` returns at once.  Returns without suspending if it does so now.

        May be cancelled and called again: no prompt is lost.  Raises DataError if there will be no further prompt.
        """

    def take(self) -> Prompt:
        """Return the next prompt.  Never waits; allowed once after each return of ``ready``."""


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without added special tokens."""

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return the text of ``token_ids``; ``--rollout-skip-special-tokens`` decides about special tokens."""


class RewardFn(Protocol):
    """The reward of an answer."""

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> float | Reward:
        """Return one number from -1e15 to 1e15.  May raise any exception; the group is then dropped as failed."""


@runtime_checkable
class GroupRewardFn(Protocol):
    """The rewards of all answers to one prompt."""

    async def of_group(self, prompt: Prompt, samples: Sequence[Sample], /) -> Sequence[float | Reward]:
        """Return one number per sample, in order.  May raise any exception; the group has then failed."""


@runtime_checkable
class HasDeadlines(Protocol):
    """A reward that limits each of its waits itself, so the stage that calls it does not."""

    has_deadlines: bool


class AdmissionHold(Protocol):
    """A reason outside the scheduler to start no new groups for a while."""

    @property
    def reason(self) -> str | None:
        """A line on who waits for whom; None if groups may start."""

    @property
    def since(self) -> float | None:
        """Start of the hold on the event loop's clock; None if groups may start."""

    @property
    def outage_s(self) -> float:
        """Seconds of all holds so far."""

    def notify(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever ``reason`` may have changed."""


class KeepFn(Protocol):
    """A filter that keeps or drops a scored group (dynamic sampling)."""

    def __call__(self, group: ScoredGroup, /) -> str | None:
        """Return None to keep the group, or a short reason for dropping it; reasons become metrics."""


class PickFn(Protocol):
    """A buffer filter: picks the groups of the next batch from the buffer."""

    def __call__(self, step: int, waiting: Sequence[ScoredGroup], size: int, /) -> Picked:
        """Pick at most ``size`` groups of ``waiting`` to train at ``step``; ``waiting`` is in dispatch order."""


class HeldOutPass(Protocol):
    """One evaluation pass, as a user's evaluation function sees it.

    Calls that are not over when the function ends are cancelled, and later ones raise RuntimeError.
    """

    @property
    def weights(self) -> Weights:
        """The weights that the engines served when the pass began."""

    @property
    def prompts(self) -> Mapping[str, tuple[Prompt, ...]]:
        """The held-out prompts by data set name."""

    async def generate(self, name: str, prompt: Prompt, index: int = 0) -> Sample:
        """Return one answer, sampled with the settings of data set ``name``.

        ``index`` must differ between the answers to one prompt; the seed depends on it.  At most half of the slots are
        used at once; further calls wait.  Raises SampleFailed or EngineRejected.
        """

    async def score(self, name: str, prompt: Prompt, sample: Sample) -> float:
        """Return the reward of data set ``name``.  Raises RewardFailed."""


class EvalFn(Protocol):
    """An evaluation that replaces the built-in one."""

    async def __call__(self, evaluation: HeldOutPass, /) -> Mapping[str, Sequence[float]] | EvalOutcome:
        """Return the rewards of all answers by data set name."""


class BatchPreparer(Protocol):
    """The user's hooks between a batch and the trainer."""

    async def prepared(self, batch: Batch) -> Batch:
        """Return the batch to train, with the same groups and tokens.  Raises HookFailed."""

    async def prepared_again(self, batch: Batch) -> Batch:
        """Return what ``prepared`` returned for this batch, for a trainer that was restarted.  Raises HookFailed.

        The hooks are called again, without filtered groups, and nothing is saved again.
        """


class GroupObserver(Protocol):
    """Sees groups leave the scheduler.  Its methods are called on the event loop and must not block."""

    def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
        """Note a scored group; ``reason`` is the filter's reason for dropping it, None if it was kept."""

    def returned(self, prompt: Prompt, group: ScoredGroup | None, outcome: str, /) -> bool:
        """Note a group that will not be trained; ``outcome`` is ``stale`` or ``failed``.

        ``group`` has its answers if it was scored.  Returns whether the observer takes the prompt, which then does not
        start again.
        """


class BatchHook(Protocol):
    """A user function between the batch and the trainer, in either shape."""

    def __call__(self, batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        """Return the batch to train; ``filtered`` are the groups that the filter dropped since the last batch.

        Runs in a thread.  May raise any exception, which ends the run.
        """


class SampleFilterFn(Protocol):
    """Leaves samples out of the loss; they still count in the normalization of their group."""

    def __call__(self, step: int, groups: Sequence[ScoredGroup], /) -> Collection[tuple[int, int]]:
        """Return ``(group_id, index)`` of each sample to leave out."""


class AllSamplesFn(Protocol):
    """Sees all groups of a step."""

    def __call__(self, step: int, trained: Sequence[ScoredGroup], filtered: Sequence[ScoredGroup], /) -> None:
        """Look at the groups of the batch, and at those dropped by the filter since the last batch."""


class RewardPostProcessFn(Protocol):
    """Replaces the comparison of rewards within groups."""

    def __call__(self, groups: Sequence[ScoredGroup], /) -> Sequence[Sequence[float]]:
        """Return for each group one finite number per sample, which takes the place of its normalized reward."""


class ConvertFn(Protocol):
    """Changes a batch before it is trained."""

    def __call__(self, batch: Batch, /) -> Batch:
        """Return the batch with other loss masks, rewards, outcomes or log-probs; its tokens must stay."""


class RolloutLogFn(Protocol):
    """Sees each trained batch and the row of its numbers."""

    def __call__(self, step: int, batch: Batch, row: Mapping[str, float | int], /) -> Mapping[str, float | int] | None:
        """Return further numbers for the row, or None."""


class EvalLogFn(Protocol):
    """Sees each evaluation."""

    def __call__(
        self, step: int, report: EvalReport, row: Mapping[str, float | int], /
    ) -> Mapping[str, float | int] | None:
        """Return further numbers for the row, or None; ``report.answers`` has the answers by data set."""


class UserSource(Protocol):
    """A user's data source in either shape.  All its methods run in one thread and may block."""

    @property
    def wants_finished(self) -> bool:
        """Whether ``finished`` is to be called."""

    @property
    def wants_returned(self) -> bool:
        """Whether ``give_back`` is to be called; otherwise prompts of stale groups start again by themselves."""

    @property
    def fetches_singly(self) -> bool:
        """Whether ``fetch`` calls the user once per prompt, and so is to be called for one prompt at a time."""

    def fetch(self, count: int, first: int, /) -> Sequence[NewPrompt]:
        """Return up to ``count`` prompts; the first gets row ``first``."""

    def finished(self, group: ScoredGroup, /) -> None:
        """Note a scored group, kept or filtered."""

    def give_back(self, prompt: Prompt, group: ScoredGroup | None, origin: Any, /) -> bool:
        """Take a stale or failed group back; False if the source refuses, so that a stale prompt starts again.

        ``origin`` is that of its ``NewPrompt``, None after a resume.
        """

    def state(self, step: int, /) -> Any:
        """Return the state after ``step`` training steps, as JSON values."""

    def load(self, step: int, state: Any, /) -> None:
        """Continue from the state of a checkpoint after ``step`` training steps."""


class ResumableSource(Protocol):
    """A source whose prompts cannot be found again by epoch and row."""

    def saved(self, step: int) -> AbstractAsyncContextManager[SourceState]:
        """Hold the source still and yield its state after ``step`` training steps.  Raises HookFailed."""
