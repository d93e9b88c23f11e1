"""The values that flow through a run: one frozen type per stage, checked in its constructor.

    Prompt ──▶ Request ──▶ Chunk* ──▶ Sample ──▶ ScoredSample ──▶ ScoredGroup ──▶ Batch ──▶ TrainReport
                                                                                     └──▶ Weights (back to the engines)

Steps are counted from 0.  ``Weights.step`` is the number of training steps behind a set of weights, which is also the
index of the step that would train on their tokens with lag 0.  Token sequences are tuples, because they are sent
between processes.
"""

import enum
import numbers
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NewType, TypeGuard

from asyncrl.token_columns import Routes, TokenSets

GroupId = NewType("GroupId", int)
"""Dispatch order of a group, from 0.  Never reused within a run."""

Floats = array[float]
"""An ``array("f", ...)`` of 4-byte floats, the precision of the engines' log-probs.  Treat it as immutable.

A tuple of 1,000 floats costs the event loop 30 microseconds to make and 30 to free; an array costs 3 and 0.  An array
is also pickled as bytes, not as 1,000 objects.
"""


LARGEST_NUMBER = 1e15
"""Largest absolute value of a reward or metric that a user's function returns.

A reward whose square is no finite number of four bytes has no standard deviation, so no advantage: this one's square
may be added up 300 million times.
"""


def is_usable(value: object) -> TypeGuard[float]:
    """Return whether a value is a number of at most ``LARGEST_NUMBER``.  Neither NaN nor infinite numbers are."""
    if not isinstance(value, numbers.Real):
        return False
    size: Any = abs(value)
    return bool(size <= LARGEST_NUMBER)


type JsonValue = bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None
"""A value as JSON has it."""


class FinishReason(enum.Enum):
    """The reason why a sample ended: a stop token, the length limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One published set of weights."""

    version: int
    """Number of the weight update, from 0; version 0 is published before the first step."""
    step: int
    """Training steps done when the weights were copied from the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Prompt:
    """One question, tokenised."""

    row: int
    """Identity of the row within an epoch: its number over all files, from 0, or its address in a stream."""
    epoch: int
    text: str
    token_ids: tuple[int, ...]
    label: JsonValue
    """The reference answer as it is in the file; None without one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] | None = None
    """The chat messages of a row, if ``text`` is their rendering and the run does not ask for it."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this prompt; they take precedence over the run's in every turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPrompt:
    """One question of a user's data source, before it is tokenised."""

    prompt: str | Sequence[Mapping[str, Any]]
    """Text, which is taken as it is, or chat messages, which are rendered with the model's chat template."""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values for rewards and filters; JSON values, because checkpoints store prompts that are not trained yet."""
    token_ids: tuple[int, ...] = ()
    """The tokens of the prompt, if the source has them already."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this prompt; they take precedence over ``--apply-chat-template-kwargs``."""
    origin: Any = None
    """The source's object of this prompt, which the source gets with a group that comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """The state of a user's data source between two calls of it."""

    fetched: int
    """Number of prompts that the source gave so far."""
    state: Any
    """State that the source returned, as JSON values."""
    ahead: tuple[Prompt, ...]
    """Prompts that the source gave and that no group has taken yet."""
    given: tuple[Prompt, ...] = ()
    """Prompts that groups have taken and that the source gives again, because its state is from before."""


GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Sampling parameters of SGLang that limit an answer by a grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings for drawing tokens.

    ``top_k`` -1 and ``top_p`` 1.0 mean no limit; ``temperature`` 0 means greedy decoding.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    """Number of tokens before which no stop token is drawn.  Stop strings end an answer earlier."""
    repetition_penalty: float = 1.0
    """Divisor of the positive logits of tokens that the answer already has; 1.0 is off.

    An engine counts only the tokens of the present request, so the tokens before an interruption have no penalty.
    """
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further sampling parameters of SGLang, such as ``min_p`` or ``json_schema``, sent as they are."""

    @property
    def is_limited(self) -> bool:
        """Whether tokens are drawn, but not among all of the vocabulary."""
        min_p = self.extra.get("min_p") or 0
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or min_p > 0)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar allows only some answers."""
        return any(self.extra.get(name) is not None for name in GRAMMARS)

    def ends_at(self, token: int) -> bool:
        """Return whether a token ends an answer.  With SGLang's ``ignore_eos``, neither end nor stop tokens do."""
        return token in self.stop_token_ids and not self.extra.get("ignore_eos")

    def after(self, num_tokens: int) -> "SamplingParams":
        """Return the settings for the rest of an answer that has ``num_tokens`` tokens."""
        return replace(
            self,
            max_new_tokens=self.max_new_tokens - num_tokens,
            min_new_tokens=max(0, self.min_new_tokens - num_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call to a rollout engine."""

    request_id: str
    """Unique within the run.  The server aborts a request by this id."""
    token_ids: tuple[int, ...]
    """The prompt, followed by the tokens that earlier attempts at this sample generated."""
    sampling: SamplingParams
    seed: int
    """Random seed below 2**31; makes sampling repeatable where the engine supports it."""
    weights: Weights
    """The weights that the engines served when the request was dispatched."""
    routing_key: str | None = None
    """Name of the episode, whose requests should reach the same engine; None: any engine."""
    routes_from: int | None = None
    """First position of ``token_ids`` whose route is asked for; None asks for no routes."""
    returns_kept: bool = False
    """Whether to return the ids that top-p and top-k kept for each token (``Chunk.kept``).

    Without effect unless ``SamplingParams.is_limited``.  An engine that cannot tell them returns NaN log-probs.
    """
    num_top: int = 0
    """Number of likeliest ids to return for each token (``Chunk.top``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that arrived in one message from an engine.

    ``version`` is the oldest version that can have produced any of them.  ``logprobs`` are natural logarithms under the
    policy that sampled the tokens, at the sampling temperature: with ``kept``, over the kept ids only.
    """

    token_ids: tuple[int, ...]
    logprobs: Floats
    version: int
    routes: Routes | None = None
    """Routes of the positions after those of the chunks before, up to the one that predicts the last token here.  The
    first chunk begins at ``Request.routes_from``.  None: not asked for, or the engine has none."""
    kept: TokenSets | None = None
    """The ids among which each token was drawn; None: the whole vocabulary, or unknown."""
    top: TokenSets | None = None
    """The likeliest ids for each token, with log-probs."""

    def __post_init__(self) -> None:
        _same_length("token_ids", self.token_ids, "logprobs", self.logprobs)
        for name, sets in (("kept", self.kept), ("top", self.top)):
            if sets is not None:
                _same_length("token_ids", self.token_ids, name, sets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Response tokens ``start`` to ``stop`` (exclusive) of a sample, all generated by one set of weights."""

    weights: Weights
    start: int
    stop: int


FIRST_ARTIFICIAL_CALL = 1 << 30
"""``Turn.call`` of trained tokens that no engine call wrote; each such region of an episode has the next number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Response tokens ``start`` to ``stop`` (exclusive) of a sample, generated by one engine call of its episode."""

    call: int
    """Number of the engine call within the episode, from 0; the same in every sample that holds the turn.  From
    FIRST_ARTIFICIAL_CALL on, there was no such call."""
    start: int
    stop: int
    finish: FinishReason
    reward: float | None = None
    """Reward of this turn alone; None if the episode gave none."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Sample:
    """One answer of T tokens: a single turn, or the turns and observations of an episode in order.

    ``token_ids`` and ``logprobs`` have length T.  Without ``turns``, ``spans`` cover 0 to T in order.  With ``turns``,
    they cover exactly the turns; the other tokens are observations, which the policy did not write: they have no span
    and the log-prob 0.  Raises ValueError otherwise.
    """

    index: int
    """Position in the group, from 0; unique within the group, also if an episode has several samples."""
    token_ids: tuple[int, ...]
    logprobs: Floats
    """Natural logarithms under the policy that sampled the tokens.  NaN where they are unknown: the trainer then uses
    its log-probs from the start of the step."""
    spans: tuple[Span, ...]
    text: str
    finish: FinishReason
    seconds: float
    """Seconds from dispatch, or from the last resumption, to the last token."""
    group_id: GroupId | None = None
    """Group of the answer; None in an evaluation."""
    resumed_at: int = 0
    """Number of tokens that were there when the answer was last resumed; 0 if it was never interrupted."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode, in order; empty if the answer is a single turn without observations."""
    prompt_ids: tuple[int, ...] | None = None
    """The tokens before the first response token, if they are not the group's prompt."""
    rollout_index: int | None = None
    """Position in the group of the episode that made the sample; None: ``index``.  Samples with equal values share one
    rollout: the loss averages over their tokens together, and counts them once."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Values that the episode left for rewards, filters and logs, besides the prompt's."""
    routes: Routes | None = None
    """Routes of all input positions, prompt and response but for its last token; None: the engine told none."""
    kept: TokenSets | None = None
    """The ids among which each token was drawn; ``logprobs`` are over these ids.  Empty sets at observations, and at
    tokens drawn from the whole vocabulary.  None: all of them were."""
    top: TokenSets | None = None
    """The likeliest ids at each token, with log-probs under the policy that sampled; empty sets at observations."""

    def __post_init__(self) -> None:
        _same_length("token_ids", self.token_ids, "logprobs", self.logprobs)
        for name, sets in (("kept", self.kept), ("top", self.top)):
            if sets is not None:
                _same_length("token_ids", self.token_ids, name, sets)
        if self.routes is not None and self.prompt_ids is not None:
            _check_routes(self.routes, len(self.prompt_ids) + len(self.token_ids))
        if self.turns:
            _check_turns(self.turns, self.spans, len(self.token_ids))
            return
        edges = [0, *(span.stop for span in self.spans)]
        starts = [*(span.start for span in self.spans), len(self.token_ids)]
        if edges != starts:
            raise ValueError(f"spans {self.spans} do not cover {len(self.token_ids)} tokens in order")

    @property
    def rollout(self) -> int:
        """Position in the group of the episode that made the sample."""
        return self.index if self.rollout_index is None else self.rollout_index

    @property
    def num_generated(self) -> int:
        """Number of tokens that the policy wrote; the others are observations."""
        return sum(turn.stop - turn.start for turn in self.turns) if self.turns else len(self.token_ids)

    @property
    def generated_mask(self) -> tuple[int, ...]:
        """A 1 for each token that the policy wrote, and a 0 for each token of an observation."""
        if not self.turns:
            return (1,) * len(self.token_ids)
        mask = bytearray(len(self.token_ids))
        for turn in self.turns:
            mask[turn.start : turn.stop] = b"\1" * (turn.stop - turn.start)
        return tuple(mask)

    @property
    def num_observed(self) -> int:
        """Number of tokens of observations."""
        return len(self.token_ids) - self.num_generated

    def without_columns(self) -> "Sample":
        """Return the sample without routes and sets of ids, which only the trainer reads: they may be megabytes."""
        if self.routes is None and self.kept is None and self.top is None:
            return self
        return replace(self, routes=None, kept=None, top=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of an answer, with the entries of a dict reward."""

    value: float
    """The number that training uses."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """All entries, numbers and others; empty if the reward is one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSample:
    """An answer with its reward; ``loss_mask`` has one 0 or 1 per token of the answer."""

    sample: Sample
    reward: float
    loss_mask: tuple[int, ...]
    reward_parts: Mapping[str, Any] = field(default_factory=dict)
    """The entries of a dict reward (``Reward.parts``)."""
    outcome: float | None = None
    """Number that a user function computed from the rewards of the step.  It replaces the estimator's comparison of
    rewards within groups.  None without such a function; either all samples of a batch have one or none."""

    def __post_init__(self) -> None:
        _same_length("token_ids", self.sample.token_ids, "loss_mask", self.loss_mask)
        if self.sample.turns and sum(self.loss_mask) != self._num_trained_in_turns():
            raise ValueError("the loss mask lets tokens through that are in no turn")

    def _num_trained_in_turns(self) -> int:
        return sum(sum(self.loss_mask[turn.start : turn.stop]) for turn in self.sample.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """All answers to one prompt, ordered by index."""

    group_id: GroupId
    prompt: Prompt
    dispatched: Weights
    """The weights that the engines served when the group was admitted or last resumed."""
    samples: tuple[ScoredSample, ...]
    """At least one per rollout; groups of episodes may have more, and differ in their number."""
    num_generated: int | None = None
    """Tokens that the group's episodes generated, each counted once, also if no sample has them.  None: the
    tokens of all samples."""

    def __post_init__(self) -> None:
        for scored in self.samples:
            sample = scored.sample
            if sample.routes is not None and sample.prompt_ids is None:
                _check_routes(sample.routes, len(self.prompt.token_ids) + len(sample.token_ids))

    @property
    def num_tokens(self) -> int:
        """Generated tokens, each counted once."""
        if self.num_generated is not None:
            return self.num_generated
        return sum(len(scored.sample.token_ids) for scored in self.samples)

    @property
    def num_observed(self) -> int:
        """Tokens of observations over all samples."""
        return sum(scored.sample.num_observed for scored in self.samples if scored.sample.turns)

    @property
    def num_trained(self) -> int:
        """Generated tokens in the loss, each counted once although several samples may hold the same turn."""
        in_turns: dict[tuple[int, int], int] = {}
        total = 0
        for scored in self.samples:
            if not scored.sample.turns:
                total += sum(scored.loss_mask)
            for turn in scored.sample.turns:
                key = (scored.sample.rollout, turn.call)
                in_turns[key] = max(in_turns.get(key, 0), sum(scored.loss_mask[turn.start : turn.stop]))
        return total + sum(in_turns.values())

    @property
    def oldest_trained_step(self) -> int | None:
        """Smallest ``Weights.step`` of any token in the loss; None if no token is in the loss."""
        steps = [
            span.weights.step
            for scored in self.samples
            for span in scored.sample.spans
            if any(scored.loss_mask[span.start : span.stop])
        ]
        return min(steps, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """The decision of a buffer filter; groups that it does not name stay in the buffer."""

    train: tuple[GroupId, ...] = ()
    """Groups of the next batch.  If they are too few, the trainer waits and the filter is called again."""
    drop: Mapping[GroupId, str] = field(default_factory=dict)
    """Groups to drop from the buffer, each with a reason that becomes a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The groups of one training step, oldest dispatched first."""

    step: int
    groups: tuple[ScoredGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """The result of one training step."""

    loss: float
    grad_norm: float
    clip_fraction: float
    """Share of trained tokens whose probability ratio was clipped."""
    entropy: float
    """Mean policy entropy per trained token, in nats."""
    learning_rate: float
    seconds: float
    """Time in the trainer, without transfers."""
    logprobs: tuple[Sequence[float], ...]
    """Log-probs under the weights before the step: one row per sample, in batch order, one value per response token."""
    advantages: tuple[Sequence[float], ...] = ()
    """Advantages, in the shape of ``logprobs``; empty unless asked for."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the algorithm, by metric name."""
    is_skipped: bool = False
    """True if the batch changed no weights, because its loss was not finite; no other number then means anything."""
    has_trainer: bool = True
    """False in a run without a trainer; no number then means anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """The bytes that one engine rank received in a weight update."""

    received: int
    needed: int
    """The bytes of the tensors of which the rank holds any part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The cost of one weight update."""

    pause_s: float
    """Seconds from the moment the first engine stops generating to the moment the last engine resumes."""
    total_s: float
    """Seconds from the first pause request; an engine finishes its forward pass before it pauses.

    If the update before failed and left the engines paused, ``pause_s`` and ``total_s`` both start at that pause.
    """
    num_bytes: int
    """The bytes of all weights."""
    rank_bytes: RankBytes | None = None
    """The bytes of the engine rank that received the most in relation to what it needs.

    None unless engines with expert parallelism receive all buckets at once.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load of one rollout engine."""

    kv_used: float
    """Share of the KV cache that requests hold, 0 to 1."""
    running: int
    """Requests being decoded."""
    waiting: int
    """Requests in the queue, retracted ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAnswers:
    """The answers to one held-out prompt, without the failed ones."""

    prompt: Prompt
    samples: tuple[ScoredSample, ...]
    finals: tuple[str | None, ...]
    """The final answer of each sample, by which majority@k counts; None if it has none."""

    def __post_init__(self) -> None:
        _same_length("samples", self.samples, "finals", self.finals)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over held-out prompts."""

    value: float
    margin: float | None = None
    """Half the width of the 95 % confidence interval; None with fewer than two prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSetReport:
    """The numbers of one set of held-out prompts.  They do not count failed answers."""

    mean: Estimate
    """Mean reward of the answers."""
    pass_at: Mapping[int, Estimate] = field(default_factory=dict)
    """The probability that at least one of k answers is right, by k; empty if answers are not right or wrong."""
    majority_at: Mapping[int, Estimate] = field(default_factory=dict)
    """The probability that the most frequent final answer is right, by the number of answers per prompt."""
    truncated: float | None = None
    """Share of the answers that the length limit cut, 0 to 1."""
    tokens_mean: float | None = None
    tokens_max: int | None = None
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """The result of one pass over the held-out prompts."""

    weights: Weights
    """The weights that the engines served when the pass began."""
    newest: Weights
    """The newest weights that generated any of its tokens; newer than ``weights`` after an update during the pass."""
    accuracy: Mapping[str, float]
    """Mean reward by data set name, over the answers that did not fail."""
    sets: Mapping[str, EvalSetReport] = field(default_factory=dict)
    """All numbers by data set name; a set without any answer is left out."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of a user's evaluation function, by its names."""
    num_samples: int
    num_failed: int
    """Answers left out because an engine or the reward failed."""
    num_tokens: int
    seconds: float
    answers: Mapping[str, tuple[tuple[Prompt, ScoredSample], ...]] = field(default_factory=dict)
    """Prompts and answers by data set name; empty unless a log function wants them, because they take memory."""
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Columns of a user's evaluation function by data set name, ``rewards`` at least; empty without such a function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOutcome:
    """The result of a user's evaluation function."""

    rewards: Mapping[str, tuple[float, ...]]
    """The reward of each answer, by data set name.  For margins, each counts as the only answer to a prompt."""
    truncated: Mapping[str, float] = field(default_factory=dict)
    """Share of the answers that the length limit cut, 0 to 1, by data set name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, by name."""
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further columns by data set name, for log functions of slime's shape."""


def _same_length(name: str, values: Sized, other: str, others: Sized) -> None:
    if len(values) != len(others):
        raise ValueError(f"{name} has {len(values)} entries, {other} has {len(others)}")


def _check_routes(routes: Routes, num_tokens: int) -> None:
    """Raise ValueError unless there is one row for each token of prompt and response but the last."""
    if len(routes) != num_tokens - 1:
        raise ValueError(f"{num_tokens} tokens of prompt and response have {len(routes)} rows of routes")


def _check_turns(turns: Sequence[Turn], spans: Sequence[Span], num_tokens: int) -> None:
    """Raise ValueError unless turns are in order and apart, and spans cover exactly them."""
    edges = [0, *(edge for turn in turns for edge in (turn.start, turn.stop)), num_tokens]
    if any(left > right for left, right in pairwise(edges)):
        raise ValueError(f"turns {turns} are not in order within {num_tokens} tokens")
    covered = _joined((turn.start, turn.stop) for turn in turns)
    if covered != _joined((span.start, span.stop) for span in spans):
        raise ValueError(f"spans {spans} do not cover the turns {turns}")


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges with neighbours joined and empty ones left out."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined
