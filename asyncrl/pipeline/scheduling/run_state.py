"""Where a run stands between two steps: what a checkpoint keeps besides weights, so that another run can go on.

A group that is unfinished, or waits to be trained, is not kept: its prompt is outstanding and comes again, and what it
had generated counts as stale.  Prompts are named by epoch and row.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.metrics.facts import GroupCounts, TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """After ``step`` training steps."""

    step: int
    version: int
    """Of the weights published last."""
    next_id: int
    """Of the next group.  Draws are seeded by it."""
    prompts_taken: int
    """From the source of prompts; all of them were trained, filtered or failed, but for the outstanding ones."""
    outstanding: tuple[tuple[int, int], ...]
    """Epoch and row of prompts that were taken and must come again, the one taken first first."""
    tokens: TokenCounts
    """Nothing is held."""
    groups: GroupCounts
    """Each was trained, filtered, stale or failed."""
    reasons: Mapping[str, int]
    """Groups that filters dropped, by reason."""
    verdicts: tuple[bool, ...]
    """The last ones of the filter, whether it kept the group."""
    retries: int
    aborts: int

    def as_json(self) -> dict[str, Any]:
        """Of numbers, texts, lists and objects only."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "RunState":
        """What ``as_json`` gave.  Raises ValueError."""
        try:
            return cls(
                **{
                    **found,
                    "outstanding": tuple((int(epoch), int(row)) for epoch, row in found["outstanding"]),
                    "tokens": TokenCounts(**found["tokens"]),
                    "groups": GroupCounts(**found["groups"]),
                    "verdicts": tuple(bool(verdict) for verdict in found["verdicts"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of a run: {error}") from error


def without_unfinished(tokens: TokenCounts, groups: GroupCounts) -> tuple[TokenCounts, GroupCounts]:
    """The accounts once everything that is held was let go of as stale."""
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
        ),
        GroupCounts(
            admitted=groups.admitted,
            trained=groups.trained,
            filtered=groups.filtered,
            stale=groups.stale + held,
            failed=groups.failed,
        ),
    )
