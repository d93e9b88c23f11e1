"""The trajectories of an episode whose function returned slime's samples.

The tokens, their order and their mask are the function's; log-probs, versions and turns are those of the record, which
saw every call.  Tokens that the function trains although no turn wrote them get the log-prob NaN, so that the trainer's
log-probs serve, and the oldest weights of the episode, so that the bound on staleness holds for them.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np

from asyncrl.compat.episodes.matching import Region, regions_of
from asyncrl.compat.episodes.new_samples import group_index_of, index_of
from asyncrl.compat.episodes.returned import ReturnedTokens, returned_tokens
from asyncrl.compat.episodes.state import status_of
from asyncrl.compat.slime_sample import SlimeStatus
from asyncrl.compat.slime_views import metadata_of_state
from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, Trajectory
from asyncrl.errors import EpisodeFailed
from asyncrl.rewards.values import reward_of
from asyncrl.rollouts.interfaces import SlimeResult
from asyncrl.rollouts.record import sets_of_turns
from asyncrl.rollouts.session import EpisodeSession, Verdict
from asyncrl.token_columns import TokenSets
from asyncrl.types import FIRST_ARTIFICIAL_CALL, FinishReason, Floats, Reward, Sample, Span, Turn, Weights

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
    return session.outcome_of(trajectories, {name: float(number) for name, number in counts.items() if number})


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
        if not isinstance(state.get("metadata") or {}, Mapping):
            raise EpisodeFailed(f"{name} has metadata of the type {type(state['metadata']).__name__}; it is a dict")
        reward = None if state.get("reward") is None else reward_of(state["reward"], reward_key)
        if reward is None and status_of(state) is SlimeStatus.ABORTED:
            raise EpisodeFailed(f"{name} has the status aborted and no reward, although nothing aborted it")
        if not state.get("response_length") and len(result.samples) == 1:
            made = _of_record(name, state, session, reward)
        else:
            given = returned_tokens(name, state, session.limits)
            sample = _sample(given, session, place, tally)
            made = (Trajectory(sample=sample, loss_mask=tuple(given.mask), reward=reward),)
        found += (_with_state(each, state, session, is_list=result.is_list) for each in made)
    return tuple(found)


class _Tally:
    """The counts of an episode, and the calls that its samples have so far."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.taken: set[int] = set()
        self._artificial = count(FIRST_ARTIFICIAL_CALL)

    def next_call(self) -> int:
        """Return a number that no call of the episode has."""
        return next(self._artificial)


def _with_state(
    trajectory: Trajectory, state: Mapping[str, Any], session: EpisodeSession, *, is_list: bool
) -> Trajectory:
    """Return the trajectory with the function's sample, for the views that rewards, filters and hooks get."""
    start = session.start
    numbers = {"index": index_of(start), "group_index": group_index_of(start), "is_list": is_list}
    metadata = metadata_of_state({**state, **numbers, "status": status_of(state).value}, start.prompt)
    text = str(state.get("response") or trajectory.sample.text)
    return replace(trajectory, sample=replace(trajectory.sample, metadata=metadata, text=text))


def _of_record(
    name: str, state: Mapping[str, Any], session: EpisodeSession, reward: Reward | None
) -> tuple[Trajectory, ...]:
    """Return the lines of the record, for a function that set no tokens.  A mask without entries trains none."""
    record = session.record
    if not record.lines:
        raise EpisodeFailed(f"{name} has no response, and the function never called the model")
    is_left_out = state.get("remove_sample") or state.get("loss_mask") is not None
    verdict = Verdict(
        rewards={} if reward is None else {line.conversation: reward for line in record.lines},
        left_out=frozenset(call for line in record.lines for call in line.owned) if is_left_out else frozenset(),
        end=EpisodeEnd.FINISHED,
    )
    return session.outcome(verdict).trajectories


def _sample(given: ReturnedTokens, session: EpisodeSession, index: int, tally: _Tally) -> Sample:
    preference = partial(_preference, given, tally)
    regions = regions_of(given.tokens, given.prompt_length, given.mask, session.record, preference)
    if regions and not session.record.num_turns:
        raise EpisodeFailed(f"{given.name} has trained tokens, but the function never called the model")
    token_ids, prompt_ids = tuple(given.tokens[given.prompt_length :]), tuple(given.tokens[: given.prompt_length])
    logprobs = _logprobs(regions, len(token_ids))
    _count(given, regions, logprobs, tally)
    turns = tuple(_turn(region, tally) for region in regions)
    return Sample(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=_spans(regions, session),
        text="",
        finish=_finish(given, turns),
        seconds=session.seconds,
        # Without turns, spans would have to cover all tokens; behind an empty turn, all of them are observations.
        turns=turns or (Turn(call=tally.next_call(), start=0, stop=0, finish=FinishReason.STOP),),
        prompt_ids=None if prompt_ids == session.start.prompt.token_ids else prompt_ids,
        kept=sets_of_turns(len(token_ids), [(each.start, _part_of(each, "kept")) for each in regions]),
        top=sets_of_turns(len(token_ids), [(each.start, _part_of(each, "top")) for each in regions]),
        routes=session.record.routes_of(given.tokens),
    )


def _part_of(region: Region, name: Literal["kept", "top"]) -> TokenSets | None:
    """Return the sets of a region; None if no turn wrote it, or its turn has none."""
    sets: TokenSets | None = None if region.turn is None else getattr(region.turn, name)
    return None if sets is None else sets.part(region.offset, region.offset + region.stop - region.start)


def _preference(given: ReturnedTokens, tally: _Tally, region: Region) -> float:
    """Return how well a turn fits, as parallel calls may give the same tokens: by log-probs, and in no sample yet.

    Positions of ``region`` count from the start of the prompt.
    """
    assert region.turn is not None
    first = max(0, region.start - given.prompt_length)
    stop = max(0, region.stop - given.prompt_length)  # 0: the whole turn is in the prompt, which has no copies
    copied = (given.logprobs or ())[first:stop]
    engines = region.turn.logprobs[: region.stop - region.start]
    alike = float(np.mean(_alike(copied, engines[-len(copied) :]))) if copied else 0.0
    return alike + (0.5 if region.turn.call not in tally.taken else 0.0)


def _turn(region: Region, tally: _Tally) -> Turn:
    turn = region.turn
    if turn is None:
        return Turn(call=tally.next_call(), start=region.start, stop=region.stop, finish=FinishReason.STOP)
    is_whole = region.offset + region.stop - region.start == len(turn.token_ids)
    finish = turn.finish if is_whole else FinishReason.STOP
    return Turn(call=turn.call, start=region.start, stop=region.stop, finish=finish)


def _spans(regions: Sequence[Region], session: EpisodeSession) -> tuple[Span, ...]:
    found: list[Span] = []
    for region in regions:
        if region.turn is None:
            found.append(Span(weights=_oldest(session), start=region.start, stop=region.stop))
            continue
        shift = region.start - region.offset
        for span in region.turn.spans:
            start, stop = max(span.start + shift, region.start), min(span.stop + shift, region.stop)
            if start < stop:
                found.append(Span(weights=span.weights, start=start, stop=stop))
    return tuple(found)


def _oldest(session: EpisodeSession) -> Weights:
    """Return the oldest weights of the episode; without a generated token, the ones served now."""
    every = (span.weights for line in session.record.lines for _, turn in line.turns for span in turn.spans)
    return min(every, key=lambda weights: (weights.step, weights.version), default=session.weights)


def _logprobs(regions: Sequence[Region], length: int) -> Floats:
    """Return the engine's log-probs at turns, NaN at regions without one, 0 at observations."""
    found = array("f", bytes(4 * length))
    for region in regions:
        size, turn = region.stop - region.start, region.turn
        found[region.start : region.stop] = (
            array("f", [math.nan]) * size if turn is None else turn.logprobs[region.offset : region.offset + size]
        )
    return found


def _count(given: ReturnedTokens, regions: Sequence[Region], logprobs: Floats, tally: _Tally) -> None:
    """Count the trained tokens that are not as the engine saw or returned them, and note the calls."""
    counts = tally.counts
    counts[CUT] += given.num_cut
    for region in regions:
        place = slice(region.start, region.stop)
        num_trained = given.mask[place].count(1)
        if region.turn is None:
            counts[UNMATCHED] += num_trained
            continue
        tally.taken.add(region.turn.call)
        counts[MOVED] += num_trained if region.is_moved else 0
        if given.logprobs is not None:
            is_trained = np.frombuffer(given.mask[place], np.bool_)
            counts[LOGPROBS_DIFFER] += int(np.sum(is_trained & ~_alike(given.logprobs[place], logprobs[place])))


def _alike(given: Sequence[Any], engines: Floats) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """Return where two lists of log-probs agree; None and anything else that is no number agrees with NaN alone."""
    try:
        found = np.array(given, np.float64)
    except (TypeError, ValueError):
        found = np.full(len(given), math.nan)
    known = np.asarray(engines)
    return np.asarray((np.abs(found - known) <= LARGEST_DIFFERENCE) | (np.isnan(found) & np.isnan(known)))


def _finish(given: ReturnedTokens, turns: Sequence[Turn]) -> FinishReason:
    if given.num_cut or given.status is SlimeStatus.TRUNCATED:
        return FinishReason.LENGTH
    last = turns[-1].finish if turns and given.status is SlimeStatus.PENDING else FinishReason.STOP
    return FinishReason.STOP if last is FinishReason.ABORT else last
