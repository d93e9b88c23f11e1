"""What flows: one frozen value type per stage, checked where it is born.

    Prompt ──▶ Request ──▶ Chunk* ──▶ Sample ──▶ ScoredSample ──▶ ScoredGroup ──▶ Batch ──▶ TrainReport
                                                                                     └──▶ Weights (back to the engines)

Steps are counted from 0.  ``Weights.step`` is the number of training steps that made those weights, which is also the
index of the step that would train on their tokens with lag 0.  Token sequences are tuples: they cross processes.
"""

import enum
from array import array
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NewType

GroupId = NewType("GroupId", int)
"""Dispatch order of a group, from 0.  Never reused within a run."""

Floats = array[float]
"""Numbers of 4 bytes each, ``array("f", ...)``, in which engines compute log-probs: a sequence of floats to whoever
reads it, and not to be changed.  A tuple of a thousand costs the event loop 30 microseconds to make and as many to
free, an array 3 and nothing; in another process it is bytes, not objects."""


class FinishReason(enum.Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A set of weights that was published to the engines, and the training steps that made it."""

    version: int
    """Counts what was published; 0 is what was before the first step."""
    step: int
    """Training steps that made these weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, tokenised."""

    row: int
    """Row in its file, from 0."""
    epoch: int
    text: str
    token_ids: tuple[int, ...]
    label: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn.  ``top_k`` -1 and ``top_p`` 1.0 mean no limit; ``temperature`` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call to a rollout engine."""

    request_id: str
    """Unique in the run; aborting goes by it."""
    token_ids: tuple[int, ...]
    """The prompt, and behind it what an interrupted attempt had already generated."""
    sampling: SamplingParams
    seed: int
    """Makes the draw repeatable where the engine supports it; below 2**31."""
    weights: Weights
    """What the engines were serving when this request was dispatched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that arrived together.

    ``version`` is the oldest version that can have produced any of them; ``logprobs`` are natural logs under the
    policy that sampled them, at the sampling temperature.
    """

    token_ids: tuple[int, ...]
    logprobs: Floats
    version: int

    def __post_init__(self) -> None:
        _same_length("token_ids", self.token_ids, "logprobs", self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens ``start`` to ``stop`` (exclusive) of a sample's response, all from one set of weights."""

    weights: Weights
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answer of T tokens; ``token_ids`` and ``logprobs`` have length T and ``spans`` cover 0 to T in order."""

    index: int
    """Place in its group, from 0."""
    token_ids: tuple[int, ...]
    logprobs: Floats
    spans: tuple[Span, ...]
    text: str
    finish: FinishReason
    seconds: float
    """From dispatch to the last token; of an interrupted sample, since it last went on."""

    def __post_init__(self) -> None:
        _same_length("token_ids", self.token_ids, "logprobs", self.logprobs)
        edges = [0, *(span.stop for span in self.spans)]
        starts = [*(span.start for span in self.spans), len(self.token_ids)]
        if edges != starts:
            raise ValueError(f"spans {self.spans} do not cover {len(self.token_ids)} tokens in order")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """An answer and what it is worth; ``loss_mask`` has one 0 or 1 per token of the answer."""

    sample: Sample
    reward: float
    loss_mask: tuple[int, ...]

    def __post_init__(self) -> None:
        _same_length("token_ids", self.sample.token_ids, "loss_mask", self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """All answers to one prompt, in order of their index."""

    group_id: GroupId
    prompt: Prompt
    dispatched: Weights
    """What the engines were serving when the group was admitted, or went on after an interruption."""
    samples: tuple[ScoredSample, ...]

    @property
    def num_tokens(self) -> int:
        """Generated tokens, over all samples."""
        return sum(len(scored.sample.token_ids) for scored in self.samples)

    @property
    def oldest_trained_step(self) -> int | None:
        """The fewest training steps behind any token that is in the loss; None when none is."""
        steps = [
            span.weights.step
            for scored in self.samples
            for span in scored.sample.spans
            if any(scored.loss_mask[span.start : span.stop])
        ]
        return min(steps, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """What a buffer filter decided; groups that it does not name keep waiting."""

    train: tuple[GroupId, ...] = ()
    """The next batch.  Fewer than it needs: the trainer waits, and the filter is asked again."""
    drop: Mapping[GroupId, str] = field(default_factory=dict)
    """Groups that are not to be trained at all, with the reason, which becomes a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one training step, oldest dispatched first."""

    step: int
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What one training step did."""

    loss: float
    grad_norm: float
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped."""
    entropy: float
    """Mean policy entropy per trained token, in nats."""
    learning_rate: float
    seconds: float
    """In the trainer, without transfers."""
    logprobs: tuple[Sequence[float], ...]
    """Under the weights before the step: one row per sample, in batch order, one number per response token."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the algorithm has to say, by the name of the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """What one weight update cost."""

    pause_s: float
    """From the first engine standing still to the last one going on."""
    total_s: float
    """From the first engine asked to pause, which finishes its forward pass first.

    After an update that failed both count from when engines stood still for that one.
    """
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How full one rollout engine is."""

    kv_used: float
    """Share of its KV cache that requests hold, 0 to 1."""
    running: int
    """Requests being decoded."""
    waiting: int
    """Requests in its queue, those that it retracted included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """One pass over the held-out prompts."""

    weights: Weights
    """What the engines were serving when the pass began."""
    newest: Weights
    """The newest weights that wrote any of its tokens; differs when an update came in between."""
    accuracy: Mapping[str, float]
    """Mean reward by data set name, over the answers that did not fail."""
    num_samples: int
    num_failed: int
    """Answers left out because an engine or the reward failed."""
    num_tokens: int
    seconds: float


def _same_length(name: str, values: Sized, other: str, others: Sized) -> None:
    if len(values) != len(others):
        raise ValueError(f"{name} has {len(values)} entries, {other} has {len(others)}")
