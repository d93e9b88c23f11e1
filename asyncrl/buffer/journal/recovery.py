"""The state of a run as its journal has it, from a checkpoint on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.buffer.journal.records import Admitted, Evaluated, Finished, PromptPlace, Published
from asyncrl.types import Batch, GroupId, JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Events after the snapshot.  Together with its state they restore the accounts.

    The groups of recorded batches are in no count but ``admitted``: they are trained again.
    """

    admitted: int = 0
    """Groups that were started for the first time."""
    filtered: int = 0
    filtered_tokens: int = 0
    stale: int = 0
    stale_tokens: int = 0
    """Tokens of stale groups, without ``wasted``."""
    failed: int = 0
    failed_tokens: int = 0
    observed_tokens: int = 0
    """Tokens of observations in groups that were dropped after their score."""
    left_out: int = 0
    """Prompts of rows in quarantine."""
    wasted: int = 0
    """Tokens that arrived late; they count as stale."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Groups that filters dropped, by reason, in order of the first."""
    verdicts: tuple[bool, ...] = ()
    """The filter's verdicts in order; True if it kept the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The state of a run at the end of its journal, with a checkpoint as its beginning."""

    step: int
    """The checkpoint's step."""
    state: Mapping[str, JsonValue]
    """The state of the snapshot."""
    batches: tuple[Batch, ...]
    """The recorded batches of the steps from ``step`` on, in order, trained or not.

    The groups are as they were finished: masks for old tokens, and changes by hooks, must be made again.
    """
    skipped: frozenset[int]
    """Steps that were recorded as skipped."""
    trained: frozenset[int]
    """Steps that were recorded as trained, skipped ones included."""
    buffered: tuple[Finished, ...]
    """The groups that wait for a batch, oldest dispatch first."""
    in_flight: tuple[Admitted, ...]
    """The groups that were neither finished nor left, in order of their ids.

    A group of the snapshot has 0 ``prompts_taken`` and no ``last_taken``.
    """
    returned: tuple[PromptPlace, ...]
    """Prompts that were returned after the snapshot and have not started again, in order."""
    started: tuple[PromptPlace, ...]
    """Prompts that started after the snapshot, or were left out, and had not been returned after it.

    They came from the source or from the prompts that the snapshot's state has as returned.
    """
    counts: Counts
    next_group_id: GroupId | None
    """The id after the largest one admitted since the snapshot; None: none was."""
    prompts_taken: int | None
    """Prompts taken from the source, as recorded last; None: none since the snapshot."""
    last_taken: tuple[int, int] | None
    published: Published | None
    """The version published last; None: none since the snapshot."""
    evaluated: tuple[Evaluated, ...]
    """Evaluations that ended since the snapshot."""
    delivered: int | None
    """Tokens delivered in all, as recorded last; None: not since the snapshot."""
    num_torn_bytes: int = 0
    """Bytes of incomplete records at the end of the journal, which were ignored."""


def recover(folder: Path, step: int) -> Recovered | None:
    """Return the state of the run from the checkpoint of ``step`` on; None without a snapshot of that step.

    Raises JournalDamaged.
    """
    raise NotImplementedError
