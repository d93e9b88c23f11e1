"""The recovery of a killed run: its checkpoint, and what its journal kept since.

checkpoint of step C ─┬─▶ batches of steps C, C + 1, ...: trained again, in their order
SAVE/journal ─────────┘   finished groups: back into the buffer;  groups in flight: start again with their ids
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.buffer.journal import Grown, Journal, PromptPlace, Recovered, has_snapshot, newest_epoch, recover
from asyncrl.errors import ConfigError, JournalDamaged, unusable
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.pipeline.scheduling.run_state import Restored, RestoredInFlight, RunState
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.types import Batch, Prompt, ScoredGroup, SourceState

JOURNAL_FOLDER = "journal"
"""Folder of the journal, in that of the checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A run as its journal has it."""

    before: RunState
    """The state at the end of the journal, but for ``step``, which is the checkpoint's."""
    restored: Restored
    again: tuple[Prompt, ...]
    """The prompts that start again with new ids, in order."""
    given: tuple[Prompt, ...]
    """Prompts of a user's data source that were taken since the checkpoint, and that the source gives again."""
    next_row: int
    """A row that no prompt of a user's data source has had, nor any later one."""
    words: str
    """A line for the user."""


@asynccontextmanager
async def journal_of(
    scheduler: Scheduler,
    save: Path,
    run_epoch: int,
    notes: Mapping[str, Any],
    *,
    has_groups: bool,
    source: SourceState | None = None,
    make: Callable[..., Journal] = Journal,
) -> AsyncIterator[None]:
    """Write the journal of a run, whose checkpoints are in the folder ``save``, and close it at the end.

    ``run_epoch`` is the fencing token of its lease.  ``has_groups`` tells whether the run recovers from this folder.
    ``source`` is the state of a user's data source at the start, whose prompts are stored whole.  ``make`` gets the
    arguments of ``Journal``.
    """
    journal = make(save / JOURNAL_FOLDER, run_epoch, delivered=lambda: scheduler.num_delivered)
    try:
        await scheduler.begin_journal(journal, notes, has_groups=has_groups, source=source)
        yield
    finally:
        await journal.close()


def last_epoch(save: Path) -> int:
    """Return the largest run epoch in the journal of a folder of checkpoints; 0 without one.  Raises OSError."""
    return newest_epoch(save / JOURNAL_FOLDER)


def recovery(
    folder: Path,
    before: RunState | None,
    notes: Mapping[str, Any],
    find: Callable[[int, int], Prompt],
    *,
    num_steps: int,
    takes_back: bool = False,
    continues: bool = True,
) -> Recovery | str | None:
    """Read what the journal in ``folder`` kept since ``before``, the state of a checkpoint, or since the start.

    The journal must have the same ``notes``, and ``find`` returns the prompt of an epoch and a row.  A user's data
    source that ``takes_back`` prompts has given those of stale groups again, as new rows.  ``continues`` tells whether
    the run can continue answers behind their tokens; episodes start again.  Returns None without such a
    journal, and a line for the user if it cannot be used, for instance because it has batches from
    ``num_steps`` on.  Raises ConfigError or NotNow.
    """
    step, mark = (before.step, before.mark) if before else (0, "")
    try:
        found = recover(folder, step, mark)
        if found is None:
            return unused_line(folder, "it belongs to another checkpoint") if has_snapshot(folder, step) else None
    except JournalDamaged as error:
        raise ConfigError(f"{error}; --no-journal resumes from the checkpoint without it") from error
    except OSError as error:
        raise unusable(f"journal {folder}: cannot be read: {error}", error) from error
    why = _obstacle(found, notes, num_steps)
    if why is not None:
        return unused_line(folder, why)
    try:
        return _recovery(found, RunState.from_json(found.state), find, takes_back=takes_back, continues=continues)
    except (KeyError, ValueError) as error:
        text = f"journal {folder}: {error}; --no-journal resumes from the checkpoint without it"
        raise ConfigError(text) from error


def prompts_at(taken: Sequence[tuple[int, int]], find: Callable[[int, int], Prompt]) -> tuple[Prompt, ...]:
    """Read prompts by epoch and row, in the order of rows: going back in a Parquet row group reads it again."""
    found = {(epoch, row): find(epoch, row) for epoch, row in sorted(taken, key=lambda each: each[1])}
    return tuple(found[epoch, row] for epoch, row in taken)


def unused_line(folder: Path, why: str) -> str:
    """Return a line for the user about a journal that is not used."""
    return f"the journal in {folder} is not used, so finished groups start again: {why}"


def _obstacle(found: Recovered, notes: Mapping[str, Any], num_steps: int) -> str | None:
    """Return the reason why a journal cannot be used; None if it can."""
    about: Any = found.state.get("about") or {}
    if about != notes:
        return ", ".join(_differences(about, notes))
    last = found.batches[-1].step if found.batches else -1
    return f"it has a batch of step {last}, num-rollout is {num_steps}" if last >= num_steps else None


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the notes that differ."""
    changed = (name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name))
    return [f"{name} was {then.get(name)}, is {now.get(name)}" for name in changed]


def _recovery(
    found: Recovered,
    at_checkpoint: RunState,
    find: Callable[[int, int], Prompt],
    *,
    takes_back: bool,
    continues: bool,
) -> Recovery:
    restored = Restored(
        batches=found.batches,
        buffered=tuple(finished.group for finished in found.buffered),
        in_flight=tuple(
            RestoredInFlight(
                group_id=each.group_id,
                prompt=each.place.prompt or find(each.place.epoch, each.place.row),
                grown=consecutive(found.growth.get(each.group_id, ())) if continues else (),
            )
            for each in found.in_flight
        ),
    )
    tokens, lost = _tokens(found, at_checkpoint.tokens, restored)
    published = found.published.version if found.published else 0
    state = replace(
        at_checkpoint,
        version=max(at_checkpoint.version, published, _newest_version(restored)),
        next_id=max(at_checkpoint.next_id, found.next_group_id or 0),
        prompts_taken=found.prompts_taken if found.prompts_taken is not None else at_checkpoint.prompts_taken,
        last_taken=found.last_taken if found.prompts_taken is not None else at_checkpoint.last_taken,
        outstanding=(),
        prompts=(),
        tokens=tokens,
        groups=_groups(found, at_checkpoint.groups),
        reasons=_reasons(found, at_checkpoint.reasons),
        verdicts=(*at_checkpoint.verdicts, *found.counts.verdicts),
    )
    words = (
        f"the journal has {len(restored.batches)} batches to train again, {len(restored.buffered)} finished groups, "
        f"and {len(restored.in_flight)} groups in flight that start again; at least {lost:,} tokens are lost"
    )
    places, given = _prompts(found, at_checkpoint, takes_back=takes_back)
    whole = {(each.epoch, each.row): each.prompt for each in places}
    again = prompts_at(list(whole), lambda epoch, row: whole[epoch, row] or find(epoch, row))
    rows = (each.row + 1 for each in found.started)
    next_row = max((at_checkpoint.source or {}).get("fetched", 0), *rows, 0)
    return Recovery(before=state, restored=restored, again=again, given=given, next_row=next_row, words=words)


def _newest_version(restored: Restored) -> int:
    """Return the newest version that a restored token names.

    An engine generates with new weights before the last engine has them, and only then is the version recorded.
    """
    groups = _kept(restored.batches, restored.buffered)
    spans = (span.weights for group in groups for scored in group.samples for span in scored.sample.spans)
    grown = (each.weights for group in restored.in_flight for each in group.grown)
    return max((weights.version for weights in (*spans, *grown)), default=0)


def _prompts(
    found: Recovered, at_checkpoint: RunState, *, takes_back: bool
) -> tuple[tuple[PromptPlace, ...], tuple[Prompt, ...]]:
    """Return the prompts that start again, and the prompts that a user's data source gives again.

    The former are the checkpoint's that waited and have not started since, and those returned since.
    """
    waiting = {(each.epoch, each.row): each for each in _waiting_at(at_checkpoint)}
    from_source = [each for each in found.started if waiting.pop((each.epoch, each.row), None) is None]
    returned = list(found.returned)
    if takes_back:
        _drop_given_twice(returned, from_source)
    given = (*at_checkpoint.given, *(each.prompt for each in from_source if each.prompt is not None))
    return (*waiting.values(), *returned), given


def _waiting_at(checkpoint: RunState) -> list[PromptPlace]:
    """Return the prompts that had been returned or fetched ahead at a checkpoint."""
    places = [PromptPlace(epoch=epoch, row=row) for epoch, row in checkpoint.outstanding]
    places += [PromptPlace(epoch=each.epoch, row=each.row, prompt=each) for each in checkpoint.prompts]
    return places[_num_outstanding(checkpoint.groups) :]


def _drop_given_twice(returned: list[PromptPlace], from_source: list[PromptPlace]) -> None:
    """Remove returned prompts that the source gave again as new rows, and these rows: the prompt did not return."""
    for place in tuple(returned):
        same = (each for each in from_source if each.row > place.row and _is_same(each.prompt, place.prompt))
        if (again := next(same, None)) is not None:
            returned.remove(place)
            from_source.remove(again)


def _is_same(one: Prompt | None, other: Prompt | None) -> bool:
    return one is not None and other is not None and (one.text, one.token_ids) == (other.text, other.token_ids)


def _num_outstanding(groups: GroupCounts) -> int:
    """Return the number of groups that were neither trained nor dropped."""
    return groups.in_flight + groups.partial + groups.buffered + groups.training


def _tokens(found: Recovered, then: TokenCounts, restored: Restored) -> tuple[TokenCounts, int]:
    """Return the account of tokens at the end of the journal, and the tokens of groups in flight, which are lost.

    The journal knows how many tokens were delivered at its snapshot and at its last commit, so a few more may be lost.
    """
    counts = found.counts
    closed = replace(
        then,
        held=0,
        filtered=then.filtered + counts.filtered_tokens,
        stale=then.stale + counts.stale_tokens + counts.wasted,
        failed=then.failed + counts.failed_tokens,
        observed=then.observed + counts.observed_tokens,
    )
    spent = closed.trained + closed.masked + closed.filtered + closed.stale + closed.failed
    kept_tokens = spent + sum(group.num_tokens for group in _kept(restored.batches, restored.buffered))
    kept_tokens += sum(group.num_tokens for group in restored.in_flight)
    lost = max(0, max(then.generated, found.delivered or 0) - kept_tokens)
    return replace(closed, generated=kept_tokens, lost=then.lost + lost), lost


def consecutive(grown: Iterable[Grown]) -> tuple[Grown, ...]:
    """Return the chunks of a group's answers, without chunks that follow a gap or were generated again later."""
    kept: dict[int, list[Grown]] = {}
    for each in grown:
        before = kept.setdefault(each.index, [])
        while before and _stop(before[-1]) > each.start:
            before.pop()
        if each.start == (_stop(before[-1]) if before else 0):
            before.append(each)
    return tuple(each for answer in kept.values() for each in answer)


def _stop(grown: Grown) -> int:
    return grown.start + len(grown.chunk.token_ids)


def _kept(batches: Sequence[Batch], buffered: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    return [*(group for batch in batches for group in batch.groups), *buffered]


def _groups(found: Recovered, then: GroupCounts) -> GroupCounts:
    """Return the account of groups at the end of the journal, in which outstanding ones are admitted alone."""
    counts = found.counts
    return GroupCounts(
        admitted=then.admitted + counts.admitted,
        trained=then.trained,
        filtered=then.filtered + counts.filtered,
        stale=then.stale + counts.stale,
        failed=then.failed + counts.failed,
        quarantined=then.quarantined + counts.left_out,
    )


def _reasons(found: Recovered, then: Mapping[str, int]) -> dict[str, int]:
    since = found.counts.reasons
    return {reason: then.get(reason, 0) + since.get(reason, 0) for reason in (*then, *since)}
