"""The values and interfaces of episodes: generation of the samples of one place in a group, by a function.

    pipeline ──EpisodeStart──▶ EpisodeFn ──generate──▶ EpisodeTurns (the pipeline again: slots, retries, interruptions)
        ◀──────EpisodeOutcome──────┘   ◀──GeneratedTurn──┘

A *turn* is one call of a rollout engine, an *observation* is tokens that the policy did not write.  The functions never
see an interruption: a weight update, a lost engine or a partial rollout happens inside ``EpisodeTurns.generate``.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import Chunk, FinishReason, Floats, GroupId, Prompt, Reward, Sample, SamplingParams, Span, Weights


class EpisodeEnd(enum.Enum):
    """The reason why an episode ended; each is counted in ``episodes/NAME``."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    CONTEXT_FULL = "context_full"
    TOOL_FAILED = "tool_failed"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """The task of one episode."""

    name: str
    """Unique among the episodes of a run, also after a resume of the run's process: the prefix of its request ids."""
    prompt: Prompt
    sampling: SamplingParams
    """The settings of the run or of the evaluation set.  ``max_new_tokens`` is the limit of one turn."""
    index: int
    """Position in the group, from 0."""
    group_size: int
    """Number of episodes in the group."""
    seed: int
    """Random seed of the episode, below 2**31; ``EpisodeTurns`` derives one for each turn."""
    group_id: GroupId | None = None
    """Group of the episode; None in an evaluation."""
    data_set: str | None = None
    """Name of the evaluation set; None in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTurn:
    """The tokens of one engine call.  ``token_ids`` and ``logprobs`` have equal length, which ``spans`` cover."""

    call: int
    """Number of the call within the episode, from 0."""
    token_ids: tuple[int, ...]
    logprobs: Floats
    spans: tuple[Span, ...]
    """Spans of this turn: positions count from its first token."""
    text: str
    finish: FinishReason
    seconds: float
    """Seconds on an engine, without the wait for a slot."""
    kept: TokenSets | None = None
    """See ``Sample.kept``."""
    top: TokenSets | None = None
    """See ``Sample.top``."""
    routes: Routes | None = None
    """Routes from the position that was asked for (``routes_from``) to the one that predicts the last token; fewer rows
    if the last ones never came."""


class EpisodeTurns(Protocol):
    """The engine calls of one episode."""

    @property
    def weights(self) -> Weights:
        """The weights that the engines serve now."""

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        routes_from: int = 0,
    ) -> GeneratedTurn:
        """Generate one turn behind ``token_ids``.  Several calls of one episode may run at once.

        ``routes_from`` is the first position of ``token_ids`` whose route the caller does not know.
        ``on_chunk`` sees each chunk as it arrives; all of them together are the turn.  The call waits for a slot, and
        while the group is interrupted.  Cancelling it aborts the request.  Raises SampleFailed after the last retry,
        EngineRejected if the engine refuses the request, and EpisodeEnded after the end of the episode.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample of an episode, with what the episode decided about its training.

    ``sample.index`` is 0 for the first sample of the episode, 1 for the next: the pipeline gives each its position in
    the group, the group's id and ``rollout_index``.
    """

    sample: Sample
    loss_mask: tuple[int, ...]
    """A 0 or 1 per response token; 0 at observations."""
    reward: Reward | None = None
    """The reward that the episode set; None: the run's reward function is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """The result of an episode."""

    trajectories: tuple[Trajectory, ...]
    """At least one.  A turn is in the loss of at most one of them, unless user code made them."""
    end: EpisodeEnd = EpisodeEnd.FINISHED
    tool_s: float = 0.0
    """Seconds in tools and other user code, without waits for engines."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further counts by metric name, such as ``episodes/branches/edited``; they are summed over a step."""


class EpisodeFn(Protocol):
    """Generates the samples of one place in a group.  Safe to call from many tasks at once."""

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        """Run one episode.  Raises EpisodeFailed, or an error of ``turns``.

        Cancelling the caller cancels the user's function, whose ``finally`` blocks run, within a limit.
        """
