"""The checks of a life, from the files that it left: the whole journal, the samples of each step, and the metrics."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.journal import Finished, Left
from asyncrl.types import ScoredGroup
from benchmarks.kills.history import History, Mark, Place, is_before

type Tokens = tuple[tuple[int, ...], ...]
"""The tokens of the answers of a group, in order."""
type Step = Mapping[int, Tokens]
"""The groups of a step's file, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """The files that a life left behind, as far as the checks need them."""

    num_steps: int
    max_staleness: int
    history: History
    missing: tuple[int, ...]
    """Numbers of the segments that are not in ``history``."""
    marks: tuple[Mark, ...]
    """The end of the journal at each kill."""
    files: tuple[Mapping[int, Step], ...]
    """The samples of each attempt, by step."""
    lags: tuple[int, ...]
    """The largest lags that rows of metrics and files of samples have."""

    @property
    def steps(self) -> dict[int, Step]:
        """The samples by step; the file of the last attempt counts."""
        return {step: groups for file in self.files for step, groups in file.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The counts of the checks.  Those below ``num_compared`` must be zero."""

    num_finished: int
    """Groups that were finished at a kill and not in a checkpoint, added over the kills."""
    num_in_flight: int
    """Groups in flight at a kill, added over the kills."""
    num_compared: int
    """Finished groups whose tokens are also in a file of samples, added over the kills."""
    finished_lost: int = 0
    """Finished at a kill, and then neither trained, dropped nor outstanding."""
    generated_again: int = 0
    """Finished at a kill, and then trained or kept with other tokens."""
    dropped_in_time: int = 0
    """Finished, and dropped as stale by a step that could have trained them."""
    prompts_lost: int = 0
    """Groups of the journal that were never trained nor dropped, and are not outstanding at the end."""
    trained_twice: int = 0
    """Prompts in more than one batch that counts, or both trained and dropped."""
    batches_changed: int = 0
    """Batches that were taken again with other groups, or in another order."""
    tokens_changed: int = 0
    """Steps whose files differ between attempts, or from the batch in the journal."""
    lags_exceeded: int = 0
    segments_missing: int = 0

    def violations(self) -> list[str]:
        """Return a reason for each count that is not zero."""
        return [text.format(getattr(self, name)) for name, text in _TEXTS.items() if getattr(self, name)]


_TEXTS = {
    "finished_lost": "{} finished groups lost",
    "generated_again": "{} finished groups generated again",
    "dropped_in_time": "{} finished groups dropped before their deadline",
    "prompts_lost": "{} groups without an end in the journal",
    "trained_twice": "{} prompts settled twice in the journal",
    "batches_changed": "{} batches taken again with other groups",
    "tokens_changed": "{} steps with other tokens",
    "lags_exceeded": "{} lags above the bound",
    "segments_missing": "{} segments of the journal not seen",
}


def kept(remains: Remains) -> Kept:
    """Check what a life left."""
    finished = [_finished(remains, mark) for mark in remains.marks]
    fates = [_Fates(remains, each) for each in finished]
    return Kept(
        num_finished=sum(_num_at_risk(remains.history, *each) for each in zip(remains.marks, finished, strict=True)),
        num_in_flight=sum(len(remains.history.in_flight(mark)) for mark in remains.marks),
        num_compared=sum(each.num_compared for each in fates),
        finished_lost=len(set().union(*(each.lost for each in fates))),
        generated_again=len(set().union(*(each.again for each in fates))),
        dropped_in_time=len(_dropped_in_time(remains)),
        prompts_lost=len(_without_an_end(remains)),
        trained_twice=_twice(remains),
        batches_changed=_batches_changed(remains.history),
        tokens_changed=_tokens_changed(remains),
        lags_exceeded=sum(lag > remains.max_staleness for lag in remains.lags),
        segments_missing=len(remains.missing),
    )


def tokens_of(group: ScoredGroup) -> Tokens:
    """Return the tokens of a group's answers."""
    return tuple(tuple(scored.sample.token_ids) for scored in group.samples)


def lengths_trained(remains: Remains) -> dict[int, list[int]]:
    """Return the lengths of the answers of each trained group."""
    trained, finished = remains.history.trained(remains.num_steps), remains.history.finished
    return {
        group_id: [len(answer) for answer in tokens_of(finished[group_id][-1][1].group)]
        for group_id in sorted(trained)
        if group_id in finished
    }


def _finished(remains: Remains, mark: Mark) -> dict[int, Finished]:
    """Return the groups that were finished at ``mark``, with the content that counted then."""
    found = {}
    for group_id, records in remains.history.finished.items():
        before = [record for place, record in records if is_before(place, mark)]
        if before and not any(is_before(place, mark) for place, _ in remains.history.ended.get(group_id, ())):
            found[group_id] = before[-1]
    return found


def _num_at_risk(history: History, mark: Mark, finished: Mapping[int, Finished]) -> int:
    """Count the groups that the newest snapshot at ``mark`` does not count as trained."""
    step = max((record.step for place, record in history.snapshots if is_before(place, mark)), default=0)
    batches = [batch for each, found in history.taken.items() if each < step for _, batch in found]
    return len(finished.keys() - {group_id for batch in batches for group_id in batch})


def _held(remains: Remains) -> set[int]:
    """Return the groups that are outstanding at the end, as the last snapshot has them."""
    snapshots = remains.history.snapshots
    return {held.group_id for held in snapshots[-1][1].held} if snapshots else set()


class _Fates:
    """The fates of the groups that were finished at one kill."""

    def __init__(self, remains: Remains, finished: Mapping[int, Finished]) -> None:
        self._history = remains.history
        self._steps = remains.steps
        self._trained = remains.history.trained(remains.num_steps)
        self._held = _held(remains)
        self.lost: set[int] = set()
        self.again: set[int] = set()
        self.num_compared = 0
        for group_id, record in finished.items():
            self._judge(group_id, tokens_of(record.group))

    def _judge(self, group_id: int, tokens: Tokens) -> None:
        history = self._history
        if tokens != tokens_of(history.finished[group_id][-1][1].group):
            self.again.add(group_id)
        if (step := self._trained.get(group_id)) is not None:
            if step in self._steps:
                self.num_compared += 1
                if self._steps[step].get(group_id) != tokens:
                    self.again.add(group_id)
        elif group_id not in history.ended and group_id not in self._held:
            self.lost.add(group_id)


def _dropped_in_time(remains: Remains) -> set[int]:
    """Return the finished groups that were dropped as stale, though the next step could have trained them."""
    found = set()
    for group_id, ends in remains.history.ended.items():
        records = remains.history.finished.get(group_id, ())
        for place, end in ends:
            before = [record for each, record in records if each < place]
            is_stale = isinstance(end, Left) and end.outcome == "stale"
            if is_stale and before and before[-1].dispatch.deadline >= _next_step(remains.history, place):
                found.add(group_id)
    return found


def _next_step(history: History, place: Place) -> int:
    """Return the step whose batch is taken next after ``place``."""
    taken = [(each, step) for step, found in history.taken.items() for each, _ in found if each < place]
    return max(taken)[1] + 1 if taken else 0


def _without_an_end(remains: Remains) -> set[int]:
    """Return the groups that started before the last snapshot, and of which nothing is known at the end."""
    history = remains.history
    if not history.snapshots:
        return set(history.admitted)
    last = history.snapshots[-1][0]
    started = {group_id for group_id, found in history.admitted.items() if found[0][0] < last}
    return started - history.trained(remains.num_steps).keys() - history.ended.keys() - _held(remains)


def _twice(remains: Remains) -> int:
    """Count the prompts that were settled more than once: trained, filtered, or failed for good."""
    history = remains.history
    settled = list(history.trained(remains.num_steps))
    settled += [group_id for group_id, ends in history.ended.items() for _, end in ends if _settles(end)]
    places = [found[-1][1].place for group_id in settled if (found := history.admitted.get(group_id))]
    counts = Counter((place.epoch, place.row) for place in places)
    in_batches = Counter(
        group_id for step, found in history.taken.items() if step < remains.num_steps for group_id in found[-1][1]
    )
    return sum(count > 1 for count in counts.values()) + sum(count > 1 for count in in_batches.values())


def _settles(end: Any) -> bool:
    return not (isinstance(end, Left) and end.returns_prompt)


def _batches_changed(history: History) -> int:
    return sum(len({group_ids for _, group_ids in found}) > 1 for found in history.taken.values())


def _tokens_changed(remains: Remains) -> int:
    """Count the steps whose samples are not those of another attempt's file, or not those of the batch."""
    changed = set()
    for step, groups in _all_files(remains.files):
        found = remains.history.taken.get(step)
        if groups != remains.steps[step] or (found and list(groups) != list(found[-1][1])):
            changed.add(step)
    return len(changed)


def _all_files(files: Sequence[Mapping[int, Step]]) -> Iterator[tuple[int, Step]]:
    for file in files:
        yield from file.items()
