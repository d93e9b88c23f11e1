"""The records of a journal: one frozen type for each event in the life of a group, a step and a version.

Admitted ──▶ Grown* ──▶ Finished ──▶ Taken ──▶ Trained ──▶ Published ──▶ Evaluated
    │                       └──────▶ Left, Filtered
    └──▶ Filtered, Left                     Snapshot: everything before it is in the checkpoint of its step
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.buffer.batches import Dispatch
from asyncrl.types import Chunk, FinishReason, GroupId, JsonValue, Prompt, ScoredGroup, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlace:
    """The place where a prompt is found again."""

    epoch: int
    row: int
    prompt: Prompt | None = None
    """The prompt, only if it cannot be found again: one of a user's data source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """A group that was outstanding at a checkpoint."""

    group_id: GroupId
    place: PromptPlace
    is_buffered: bool
    """Whether it was scored and kept; its content is then in its last ``Finished`` record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state at a checkpoint; always the first record of a segment."""

    step: int
    """Training steps done; the number in the checkpoint's name."""
    state: Mapping[str, JsonValue]
    """The accounts of the scheduler, of which the journal knows nothing."""
    held: tuple[HeldGroup, ...]
    pending: "tuple[Taken, ...]" = ()
    """Batches that a recovery has recorded and not trained again; their groups are held and buffered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A group that was started, or started again after a recovery."""

    group_id: GroupId
    place: PromptPlace
    prompts_taken: int
    """Prompts taken from the source so far, this one included."""
    last_taken: tuple[int, int] | None
    """Epoch and row of the prompt taken from the source last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Tokens of an answer in flight, which a run with partial rollouts continues behind them."""

    group_id: GroupId
    index: int
    """Position of the answer in its group."""
    start: int
    """Tokens that the answer had before."""
    weights: Weights
    """The weights that generated the tokens."""
    chunk: Chunk
    finish: FinishReason | None = None
    """The reason for which the answer ended before the chunk, which is then empty; None: it may continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group that was scored and kept.  If a group has several such records, the last one counts."""

    dispatch: Dispatch
    group: ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """A group that a filter dropped, before or after it was buffered."""

    group_id: GroupId
    reason: str
    num_tokens: int
    num_observed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A group that will not be trained, because it was too old or failed."""

    group_id: GroupId
    outcome: Literal["stale", "failed"]
    num_tokens: int
    returns_prompt: bool
    """Whether its prompt starts again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A prompt of a row in quarantine, which started no group."""

    place: PromptPlace
    prompts_taken: int | None = None
    """See ``Admitted``; None: not told."""
    last_taken: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wasted:
    """Tokens that arrived late, for groups that had been interrupted or dropped, or for an answer that began anew."""

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The groups of a step's batch, in order."""

    step: int
    group_ids: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A step that ended."""

    step: int
    is_skipped: bool
    """Whether it changed no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version of the weights that the engines serve."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation that ended."""

    version: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Tokens that engines have delivered so far, over the whole run.  The journal writes it with each commit."""

    num_tokens: int


type Record = (
    Snapshot
    | Admitted
    | Grown
    | Finished
    | Filtered
    | Left
    | LeftOut
    | Wasted
    | Taken
    | Trained
    | Published
    | Evaluated
    | Delivered
)
