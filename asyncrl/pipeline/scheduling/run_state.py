"""The state of a run between two steps.  A checkpoint stores it besides the weights, so that another run can resume.

Unfinished and buffered groups are not stored.  Without a journal, their prompts are outstanding and start again, and
their tokens count as stale.  Prompts are identified by epoch and row; those of a user's data source are stored whole.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from asyncrl.buffer.journal import Grown
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.types import Batch, GroupId, Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run after ``step`` training steps."""

    step: int
    version: int
    """Version of the weights published last."""
    next_id: int
    """Id of the next group, which also seeds the sampling of its answers."""
    prompts_taken: int
    """Prompts taken from the source; all but the outstanding ones were trained, filtered, failed or in quarantine."""
    outstanding: tuple[tuple[int, int], ...]
    """Epoch and row of prompts that were taken and must start again, in the order in which they start."""
    tokens: TokenCounts
    """The token account, with nothing held."""
    groups: GroupCounts
    """The group account, in which every group was trained, filtered, stale or failed."""
    reasons: Mapping[str, int]
    """Number of groups that filters dropped, by reason."""
    verdicts: tuple[bool, ...]
    """The filter's last verdicts, oldest first; True if it kept the group."""
    retries: int
    """Attempts after an engine failure, so far."""
    aborts: int
    """Attempts that an interruption ended, so far."""
    prompts: tuple[Prompt, ...] = ()
    """Prompts of a user's data source that must start again, instead of ``outstanding``."""
    source: Mapping[str, Any] | None = None
    """State of a user's data source: ``fetched`` prompts and the ``state`` that it gave; None without one."""
    given: tuple[Prompt, ...] = ()
    """Prompts that groups have taken, and that a source in the state of ``source`` gives again."""
    last_taken: tuple[int, int] | None = None
    """Epoch and row of the prompt taken from the source last.  A stream of prompts continues behind it."""
    mark: str = ""
    """Random name of the checkpoint, by which its journal is recognized; empty before the first checkpoint."""

    def as_json(self) -> dict[str, Any]:
        """Return the state as a dictionary of JSON values; tuples become lists when it is written."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunState":
        """Return the state that ``as_json`` wrote.  Raises ValueError if ``found`` is not one.

        Fields that are missing, because an earlier version wrote it, get their defaults.  Unknown ones are ignored.
        """
        try:
            return cls(
                **{
                    **_known(cls, found),
                    "outstanding": tuple((int(epoch), int(row)) for epoch, row in found["outstanding"]),
                    "tokens": TokenCounts(**_known(TokenCounts, found["tokens"])),
                    "groups": GroupCounts(**_known(GroupCounts, found["groups"])),
                    "prompts": tuple(_prompt(prompt) for prompt in found.get("prompts", ())),
                    "given": tuple(_prompt(prompt) for prompt in found.get("given", ())),
                    "verdicts": tuple(bool(verdict) for verdict in found["verdicts"]),
                    "last_taken": _place(found.get("last_taken")),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of a run: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredInFlight:
    """A group that was in flight.  It starts again with its id, which seeds the sampling of its answers."""

    group_id: GroupId
    prompt: Prompt
    grown: tuple[Grown, ...] = ()
    """Tokens of its answers, which continue behind them; each begins where the one before of the same answer ends."""

    @property
    def num_tokens(self) -> int:
        """Tokens that its answers have."""
        return sum(len(each.chunk.token_ids) for each in self.grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The groups of a killed run that its journal kept, from the checkpoint of a RunState on."""

    batches: tuple[Batch, ...] = ()
    """Batches to train again, of consecutive steps from the checkpoint on."""
    buffered: tuple[ScoredGroup, ...] = ()
    """Groups that wait for a batch, oldest dispatch first."""
    in_flight: tuple[RestoredInFlight, ...] = ()

    @property
    def newest_step(self) -> int:
        """The largest step of the weights under which a buffered group was dispatched; 0 without one."""
        return max((group.dispatched.step for group in self.buffered), default=0)


def _known(kind: type[Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``found`` that are fields of the dataclass ``kind``."""
    return {field.name: found[field.name] for field in fields(kind) if field.name in found}


def _prompt(found: Mapping[str, Any]) -> Prompt:
    messages = found.get("messages")
    changed = {"token_ids": tuple(found["token_ids"]), "messages": None if messages is None else tuple(messages)}
    return Prompt(**{**_known(Prompt, found), **changed})


def _place(found: Any) -> tuple[int, int] | None:
    if found is None:
        return None
    epoch, row = found
    return int(epoch), int(row)


def without_unfinished(tokens: TokenCounts, groups: GroupCounts) -> tuple[TokenCounts, GroupCounts]:
    """Return the accounts with every held group and token counted as stale.

    Raises AssertionError if a batch is in training.
    """
    held = groups.in_flight + groups.partial + groups.buffered
    if groups.training:
        raise AssertionError(f"{groups.training} groups are in training: a run has no state within a step")
    return (
        TokenCounts(
            generated=tokens.generated,
            trained=tokens.trained,
            masked=tokens.masked,
            filtered=tokens.filtered,
            stale=tokens.stale + tokens.held,
            failed=tokens.failed,
            observed=tokens.observed,
            trained_copies=tokens.trained_copies,
            lost=tokens.lost,
        ),
        GroupCounts(
            admitted=groups.admitted,
            trained=groups.trained,
            filtered=groups.filtered,
            stale=groups.stale + held,
            failed=groups.failed,
            quarantined=groups.quarantined,
        ),
    )
