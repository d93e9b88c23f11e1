"""What rooms promise each other.  For each promise there is a fake in ``engines/fake.py`` and a contract test."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from asyncrl.types import (
    Batch,
    Chunk,
    EngineLoad,
    FinishReason,
    Picked,
    Prompt,
    Request,
    Sample,
    ScoredGroup,
    TrainReport,
    UpdateReport,
    Weights,
)


class RolloutEngine(Protocol):
    """Turns prompts into tokens.  Safe to call from many tasks at once."""

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """Sample one answer, calling ``on_chunk`` with its tokens as they arrive, in order.

        Every token that the caller is charged for went through ``on_chunk`` exactly once, also when this raises.
        A weight update during the call does not end it.  Cancelling the caller aborts the request on the server.
        Returns FinishReason.ABORT after ``interrupt``.  Raises EngineTimeout, EngineLost or EngineRejected.
        """

    async def interrupt(self) -> None:
        """End every call of ``generate`` with FinishReason.ABORT; return once none is left.

        The tokens that were generated have gone through ``on_chunk``, each exactly once.  A request that ends by itself
        at that moment ends as it would have.  No call may begin before this returns.  Engines that others use as well
        lose none of the others' requests.  Raises nothing: an engine that does not answer loses its requests, whose
        calls raise EngineLost.
        """

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """Log-probs of ``token_ids[start:]`` at temperature 1, each given all tokens before it, under the weights now
        served.

        Raises EngineTimeout, EngineLost or EngineRejected.
        """


class LoadProbe(Protocol):
    """Says how full the rollout engines are."""

    async def loads(self) -> tuple[EngineLoad, ...]:
        """One per engine that answered.  Raises nothing."""


class WeightUpdater(Protocol):
    """Carries the trainer's weights to every engine."""

    async def snapshot(self) -> bool:
        """Take the trainer's present weights for the next ``publish``.

        True: they are copied, and the trainer may continue at once.  False: it must wait until they are published.
        Raises WeightUpdateFailed.
        """

    async def resnapshot(self) -> bool:
        """Reuse the last snapshot for the next ``publish``, without stopping the trainer.

        Returns False if the snapshot is gone.  Raises WeightUpdateFailed.
        """

    async def publish(self, weights: Weights) -> UpdateReport:
        """Return once every engine samples from the last snapshot, labelled ``weights``.

        Requests in flight are paused, not lost.  Cancelling in mid-update leaves the engines unusable.
        Raises WeightUpdateFailed, as UpdateInterrupted when another snapshot may be published.
        """

    async def wait_for_rejoined(self) -> None:
        """Wait until an engine that was started again needs weights outside the regular schedule."""


class GpuSharing(Protocol):
    """Trainer and engines on the same GPUs, one after the other:  engines ─▶ trainer ─▶ update ─▶ engines ─▶ ...

    Each call returns at once when it is their turn already, and raises GpuSharingFailed.
    """

    async def acquire_for_training(self) -> None:
        """The engines, which must have no requests, give up weights and caches; the trainer gets its memory."""

    async def acquire_for_update(self) -> None:
        """The engines have room for weights again, beside the trainer's own: all else of the trainer's is put away."""

    async def acquire_for_generation(self) -> None:
        """The trainer gives up its memory; the engines, which have new weights, get their caches back."""


class Trainer(Protocol):
    """Makes weights."""

    async def train(self, batch: Batch) -> TrainReport:
        """Run one step; the new weights stay in the trainer until they are published.

        The gradient depends on the batch's content alone, not on how it is packed.
        Raises NonFiniteLoss (weights unchanged) or TrainerFailed.
        """

    async def save(self, path: Path) -> None:
        """Write the present weights to ``path`` in Hugging Face format.  Raises TrainerFailed."""


class Checkpointer(Protocol):
    """Keeps what a run needs to go on after it has ended, however it ends."""

    async def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """Return once the trainer's present state, that after ``step`` steps, is copied; it is written beside.

        ``run`` is kept with it: numbers, texts, lists and objects.  A checkpoint can be loaded when it is complete, and
        not before.  Waits for the checkpoint before, first.  Raises CheckpointFailed, also for the one before, or
        TrainerFailed.
        """

    async def finish(self) -> None:
        """Return once no checkpoint is being written.  Raises CheckpointFailed or TrainerFailed."""


class PromptSource(Protocol):
    """Endless prompts, each epoch a fresh permutation, the same for the same seed."""

    def take(self) -> Prompt:
        """The next prompt.  Never waits."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids, without special tokens added."""

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Text, special tokens left out."""


class RewardFn(Protocol):
    """What an answer is worth."""

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> float:
        """One finite number.  May raise anything; that costs the group."""


class KeepFn(Protocol):
    """Which groups to keep (dynamic sampling)."""

    def __call__(self, group: ScoredGroup, /) -> str | None:
        """``None`` to keep the group, or a short reason for dropping it, which becomes a metric."""


class PickFn(Protocol):
    """Which of the groups that wait to be trained go into the next batch (a buffer filter)."""

    def __call__(self, step: int, waiting: Sequence[ScoredGroup], size: int, /) -> Picked:
        """At most ``size`` of ``waiting`` to train at ``step``; ``waiting`` has the oldest dispatched first."""
