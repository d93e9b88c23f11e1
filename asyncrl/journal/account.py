"""The account of groups and tokens at a step."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.buffer.journal.reader import opened
from asyncrl.buffer.journal.recovery import last_snapshot, replayed
from asyncrl.buffer.journal.replay import Recovered
from asyncrl.errors import DataError
from asyncrl.journal.listing import table
from asyncrl.types import ScoredGroup

_HEAD = ("", "groups at the snapshot", "since", "tokens at the snapshot", "since")
_UNKNOWN = "-"


def account(folder: Path, step: int | None) -> Iterator[str]:
    """Yield the lines of the account after ``step`` training steps; None: at the end of the journal.

    Raises JournalDamaged, and DataError if the journal does not reach back or forward to the step.
    """
    found = opened(folder)
    base = last_snapshot(found, lambda each: step is None or each.step <= step)
    if base is None:
        raise DataError(f"{folder} has no snapshot of step {step} or before" if step is not None else _NO_SNAPSHOT)
    replay = replayed(found, base, step)
    if step is not None and replay.steps_done < step:
        raise DataError(f"{folder} ends after step {replay.steps_done}, before step {step}")
    state = replay.recovered()
    yield f"after {replay.steps_done} steps, {len(state.batches)} of them taken since the snapshot of step {state.step}"
    yield from table([_HEAD, *_rows(state)])
    if state.delivered is not None:
        yield f"{state.delivered:,} tokens delivered in all, {state.counts.wasted:,} of them late since the snapshot"


_NO_SNAPSHOT = "the journal has no snapshot"


def _rows(state: Recovered) -> Iterator[tuple[str, ...]]:
    counts = state.counts
    trained = [batch for batch in state.batches if batch.step in state.trained - state.skipped]
    skipped = [batch for batch in state.batches if batch.step in state.skipped]
    training = [batch for batch in state.batches if batch.step not in state.trained]
    in_batches = {
        name: [group for batch in batches for group in batch.groups]
        for name, batches in (("trained", trained), ("failed", skipped), ("in training", training))
    }
    since: Mapping[str, tuple[int, int | None]] = {
        "trained": _sizes(in_batches["trained"]),
        "filtered": (counts.filtered, counts.filtered_tokens),
        "stale": (counts.stale, counts.stale_tokens + counts.wasted),
        "failed": _plus(_sizes(in_batches["failed"]), counts.failed, counts.failed_tokens),
        "in training": _sizes(in_batches["in training"]),
        "buffered": _sizes([each.group for each in state.buffered]),
        "in flight": (len(state.in_flight), None),
        "admitted": (counts.admitted, None),
    }
    for name, (groups, tokens) in since.items():
        before = (_before(state.state, each, name) for each in ("groups", "tokens"))
        groups_before, tokens_before = before
        yield name, groups_before, f"{groups:,}", tokens_before, _UNKNOWN if tokens is None else f"{tokens:,}"


def _sizes(groups: Iterable[ScoredGroup]) -> tuple[int, int]:
    sizes = [group.num_tokens for group in groups]
    return len(sizes), sum(sizes)


def _plus(sizes: tuple[int, int], groups: int, tokens: int) -> tuple[int, int]:
    return sizes[0] + groups, sizes[1] + tokens


def _before(state: Mapping[str, Any], unit: str, name: str) -> str:
    """Return a count of the snapshot's state, as far as it has such counts; masked tokens are trained ones here."""
    counts = state.get(unit)
    found = counts.get(name.replace(" ", "_")) if isinstance(counts, dict) else None
    if not isinstance(found, int):
        return _UNKNOWN
    masked = counts.get("masked", 0) if isinstance(counts, dict) and name == "trained" and unit == "tokens" else 0
    return f"{found + (masked if isinstance(masked, int) else 0):,}"
