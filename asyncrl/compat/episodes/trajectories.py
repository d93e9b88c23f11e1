"""The trajectories of an episode whose function returned slime's samples.

The tokens, their order and their mask are the function's; log-probs, versions and turns are those of the record, which
saw every call.  Tokens that the function trains although no turn wrote them get the log-prob NaN, so that the trainer's
log-probs serve, and the oldest weights of the episode, so that the bound on staleness holds for them.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from asyncrl.compat.episodes.matching import Region, regions_of
from asyncrl.compat.episodes.new_samples import group_index_of, index_of
from asyncrl.compat.episodes.state import status_of
from asyncrl.compat.slime_sample import SlimeStatus
from asyncrl.compat.slime_views import metadata_of_state
from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, Trajectory
from asyncrl.errors import EpisodeFailed
from asyncrl.rewards.values import reward_of
from asyncrl.rollouts.interfaces import SlimeResult
from asyncrl.rollouts.record import TokenIds, TokenRecord, ids_of
from asyncrl.rollouts.session import EpisodeSession, Verdict
from asyncrl.types import FinishReason, Floats, Reward, Sample, Span, Turn, Weights

FIRST_ARTIFICIAL_CALL = 1 << 30
"""``Turn.call`` of trained tokens that no engine call wrote; each such region of an episode has the next number."""
UNMATCHED = "episodes/unmatched_tokens"
"""Trained tokens that no turn of the record has."""
MOVED = "episodes/moved_tokens"
"""Trained tokens of turns that the function put behind other tokens than the engine saw."""
LOGPROBS_DIFFER = "episodes/logprobs_differ"
"""Trained tokens whose log-prob in ``rollout_log_probs`` is not the engine's, which is used."""
CUT = "episodes/cut_tokens"
"""Response tokens beyond the maximum context length, which are left out."""

LARGEST_DIFFERENCE = 1e-3
"""Difference of two log-probs that counts as none: JSON and float32 change them by less."""


def outcome_of(
    session: EpisodeSession, result: SlimeResult, *, reward_key: str | None = None, eval_reward_key: str | None = None
) -> EpisodeOutcome:
    """End the episode and return its result; see ``trajectories_of``.

    ``eval_reward_key`` replaces ``reward_key`` in an evaluation.
    """
    counts: Counter[str] = Counter()
    key = reward_key if session.start.data_set is None else eval_reward_key or reward_key
    trajectories = trajectories_of(session, result, key, counts)
    session.close(EpisodeEnd.FINISHED)
    return session.outcome_of(trajectories, {name: float(count) for name, count in counts.items() if count})


def trajectories_of(
    session: EpisodeSession, result: SlimeResult, reward_key: str | None = None, counts: Counter[str] | None = None
) -> tuple[Trajectory, ...]:
    """Return one trajectory per returned sample, or those of the record for a sample without response tokens.

    ``reward_key`` selects the entry of a dict reward; ``counts`` grows by the module's metrics.  Raises EpisodeFailed
    for samples that cannot be trained, and RewardFailed.
    """
    tally = _Tally(Counter() if counts is None else counts)
    if not result.samples:
        raise EpisodeFailed(f"{session.start.name}: the function returned an empty list")
    found: list[Trajectory] = []
    for place, state in enumerate(result.samples):
        name = f"{session.start.name}: sample {place}" if result.is_list else f"{session.start.name}: the sample"
        reward = None if state.get("reward") is None else reward_of(state["reward"], reward_key)
        if reward is None and status_of(state) is SlimeStatus.ABORTED:
            raise EpisodeFailed(f"{name} has the status aborted and no reward, although nothing aborted it")
        if not state.get("response_length") and len(result.samples) == 1:
            made = _of_record(name, state, session, reward)
        else:
            made = (_trajectory(_Given.read(name, state, session, tally), session, reward, place, tally),)
        found += (_with_state(each, state, session, is_list=result.is_list) for each in made)
    return tuple(found)


def _with_state(
    trajectory: Trajectory, state: Mapping[str, Any], session: EpisodeSession, *, is_list: bool
) -> Trajectory:
    """Return the trajectory with the function's sample, for the views that rewards, filters and hooks get."""
    start = session.start
    numbers = {"index": index_of(start), "group_index": group_index_of(start), "is_list": is_list}
    metadata = metadata_of_state({**state, **numbers, "status": status_of(state).value}, start.prompt)
    text = str(state.get("response") or trajectory.sample.text)
    return replace(trajectory, sample=replace(trajectory.sample, metadata=metadata, text=text))


class _Tally:
    """The counts of an episode, and the numbers of its artificial calls."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.taken: set[int] = set()
        """Calls whose turns are in an earlier sample of the episode."""
        self._calls = count(FIRST_ARTIFICIAL_CALL)

    def next_call(self) -> int:
        """Return a number that no call of the episode has."""
        return next(self._calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What a returned sample says about its tokens, checked."""

    name: str
    tokens: TokenIds
    """Prompt and response."""
    prompt_length: int
    mask: tuple[int, ...]
    logprobs: Sequence[Any] | None
    text: str
    status: SlimeStatus
    is_cut: bool

    @classmethod
    def read(cls, name: str, state: Mapping[str, Any], session: EpisodeSession, tally: _Tally) -> "_Given":
        """Read a state.  Raises EpisodeFailed."""
        tokens, length = state.get("tokens") or [], int(state.get("response_length") or 0)
        if len(tokens) <= length:
            raise EpisodeFailed(
                f"{name} has {len(tokens)} tokens, and a response_length of {length}; tokens hold prompt and response"
            )
        top = session.limits.vocabulary_size
        wrong = next((each for each in tokens if type(each) is not int or not 0 <= each < top), None)
        if wrong is not None:
            raise EpisodeFailed(f"{name} has the token {wrong!r}; token ids are 0 to {top - 1}")
        tokens = ids_of(tokens)
        prompt_length = len(tokens) - length
        room = max(0, session.limits.max_context_len - prompt_length)
        tally.counts[CUT] += max(0, length - room)
        logprobs = state.get("rollout_log_probs")
        if logprobs is not None and len(logprobs) != length:
            raise EpisodeFailed(f"{name} has {len(logprobs)} rollout_log_probs, its response_length is {length}")
        return cls(
            name=name,
            tokens=tokens[: prompt_length + room],
            prompt_length=prompt_length,
            mask=_mask(name, state, length)[:room],
            logprobs=logprobs,
            text=str(state.get("response") or ""),
            status=status_of(state),
            is_cut=room < length,
        )


def _mask(name: str, state: Mapping[str, Any], length: int) -> tuple[int, ...]:
    given = state.get("loss_mask")
    if given is not None and len(given) != length:
        raise EpisodeFailed(f"{name} has a loss_mask of {len(given)} entries, its response_length is {length}")
    if given is not None and any(each not in (0, 1) for each in given):
        raise EpisodeFailed(f"{name} has a loss_mask with other entries than 0 and 1")
    if state.get("remove_sample"):
        return (0,) * length
    return (1,) * length if given is None else tuple(int(each) for each in given)


def _trajectory(given: _Given, session: EpisodeSession, reward: Reward | None, index: int, tally: _Tally) -> Trajectory:
    regions = regions_of(
        given.tokens, given.prompt_length, given.mask, session.record, partial(_preference, given, tally)
    )
    tally.taken |= {region.turn.call for region in regions if region.turn is not None}
    if regions and not session.record.num_turns:
        raise EpisodeFailed(f"{given.name} has trained tokens, but the function never called the model")
    token_ids = tuple(given.tokens[given.prompt_length :])
    logprobs = _logprobs(regions, len(token_ids))
    _count(given, regions, logprobs, tally.counts)
    prompt_ids = tuple(given.tokens[: given.prompt_length])
    turns = tuple(_turn(region, tally) for region in regions)
    sample = Sample(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=_spans(regions, session.record),
        text=given.text,
        finish=_finish(given, turns),
        seconds=session.seconds,
        # Without any turn all tokens are observations; an empty turn says so.
        turns=turns or (Turn(call=tally.next_call(), start=0, stop=0, finish=FinishReason.STOP),),
        prompt_ids=None if prompt_ids == session.start.prompt.token_ids else prompt_ids,
    )
    return Trajectory(sample=sample, loss_mask=given.mask, reward=reward)


def _preference(given: _Given, tally: _Tally, region: Region) -> float:
    """Return how well a turn fits, as parallel calls may give the same tokens: by log-probs, and in no sample yet.

    Positions of ``region`` count from the start of the prompt.
    """
    assert region.turn is not None
    first = max(0, region.start - given.prompt_length)
    copied = (given.logprobs or ())[first : region.stop - given.prompt_length]
    alike = sum(map(_is_alike, copied, region.turn.logprobs))
    return alike / max(1, len(copied)) + (0.5 if region.turn.call not in tally.taken else 0.0)


def _turn(region: Region, tally: _Tally) -> Turn:
    turn = region.turn
    if turn is None:
        return Turn(call=tally.next_call(), start=region.start, stop=region.stop, finish=FinishReason.STOP)
    is_whole = region.offset + region.stop - region.start == len(turn.token_ids)
    finish = turn.finish if is_whole else FinishReason.STOP
    return Turn(call=turn.call, start=region.start, stop=region.stop, finish=finish)


def _spans(regions: Sequence[Region], record: TokenRecord) -> tuple[Span, ...]:
    found: list[Span] = []
    for region in regions:
        if region.turn is None:
            found.append(Span(weights=_oldest(record), start=region.start, stop=region.stop))
            continue
        shift = region.start - region.offset
        for span in region.turn.spans:
            start, stop = max(span.start + shift, region.start), min(span.stop + shift, region.stop)
            if start < stop:
                found.append(Span(weights=span.weights, start=start, stop=stop))
    return tuple(found)


def _oldest(record: TokenRecord) -> Weights:
    every = (span.weights for line in record.lines for _, turn in line.turns for span in turn.spans)
    return min(every, key=lambda weights: (weights.step, weights.version))


def _logprobs(regions: Sequence[Region], length: int) -> Floats:
    """Return the engine's log-probs at turns, NaN at regions without one, 0 at observations."""
    found = array("f", bytes(4 * length))
    for region in regions:
        size = region.stop - region.start
        turn = region.turn
        found[region.start : region.stop] = (
            array("f", [math.nan]) * size if turn is None else turn.logprobs[region.offset : region.offset + size]
        )
    return found


def _count(given: _Given, regions: Sequence[Region], logprobs: Floats, counts: Counter[str]) -> None:
    """Count the trained tokens that are not as the engine saw or returned them."""
    for region in regions:
        trained = [place for place in range(region.start, region.stop) if given.mask[place]]
        if region.turn is None:
            counts[UNMATCHED] += len(trained)
            continue
        counts[MOVED] += len(trained) if region.is_moved else 0
        if given.logprobs is not None:
            counts[LOGPROBS_DIFFER] += sum(not _is_alike(given.logprobs[at], logprobs[at]) for at in trained)


def _is_alike(given: Any, engines: float) -> bool:
    return isinstance(given, int | float) and abs(given - engines) <= LARGEST_DIFFERENCE


def _finish(given: _Given, turns: Sequence[Turn]) -> FinishReason:
    if given.is_cut or given.status is SlimeStatus.TRUNCATED:
        return FinishReason.LENGTH
    last = turns[-1].finish if turns and given.status is SlimeStatus.PENDING else FinishReason.STOP
    return FinishReason.STOP if last is FinishReason.ABORT else last


def _of_record(
    name: str, state: Mapping[str, Any], session: EpisodeSession, reward: Reward | None
) -> tuple[Trajectory, ...]:
    """Return the lines of the record, for a function that set no tokens.  A mask without entries trains none."""
    record = session.record
    if not record.lines:
        raise EpisodeFailed(f"{name} has no response, and the function never called the model")
    is_left_out = state.get("remove_sample") or state.get("loss_mask") is not None
    outcome = session.outcome(
        Verdict(
            rewards={} if reward is None else {line.conversation: reward for line in record.lines},
            left_out=frozenset(call for line in record.lines for call in line.owned) if is_left_out else frozenset(),
            end=EpisodeEnd.FINISHED,
        )
    )
    return outcome.trajectories
