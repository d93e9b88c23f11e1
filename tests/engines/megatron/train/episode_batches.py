"""Batches of episodes: turns with observations between them, several samples of a rollout, uneven groups."""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.token_columns import TokenSets
from asyncrl.types import (
    Batch,
    FinishReason,
    GroupId,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    Turn,
)
from tests.engines.megatron.tiny import START, VOCAB

Stretch = tuple[str, int]
"""``("turn", n)`` or ``("observation", n)``: n tokens in a row."""


def sample_of(
    stretches: Sequence[Stretch],
    rng: random.Random,
    *,
    index: int = 0,
    rollout: int | None = None,
    prompt_ids: tuple[int, ...] | None = None,
    turn_rewards: Sequence[float | None] = (),
) -> Sample:
    """A sample of these stretches, with log-probs near those of a random model, and 0 at observations."""
    turns: list[Turn] = []
    logprobs = array("f")
    for kind, length in stretches:
        start = len(logprobs)
        if kind == "turn":
            reward = turn_rewards[len(turns)] if turn_rewards else None
            place = {"call": len(turns), "start": start, "stop": start + length}
            turns.append(Turn(**place, finish=FinishReason.STOP, reward=reward))
        logprobs.extend([rng.uniform(-6.0, -3.0) if kind == "turn" else 0.0 for _ in range(length)])
    return Sample(
        index=index,
        rollout_index=rollout,
        token_ids=tuple(rng.randrange(VOCAB) for _ in logprobs),
        logprobs=logprobs,
        spans=tuple(Span(weights=START, start=turn.start, stop=turn.stop) for turn in turns),
        turns=tuple(turns),
        text="",
        finish=FinishReason.STOP,
        seconds=1.0,
        prompt_ids=prompt_ids,
    )


def mask_of(sample: Sample) -> tuple[int, ...]:
    """1 at the tokens of turns."""
    mask = [0] * len(sample.token_ids)
    for turn in sample.turns:
        mask[turn.start : turn.stop] = [1] * (turn.stop - turn.start)
    return tuple(mask)


def group_of(number: int, samples: Sequence[Sample], rewards: Sequence[float], rng: random.Random) -> ScoredGroup:
    """A group of samples whose turns are all in the loss."""
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))
    return ScoredGroup(
        group_id=GroupId(number),
        prompt=Prompt(row=number, epoch=0, text="", token_ids=prompt, label=None),
        dispatched=START,
        samples=tuple(
            ScoredSample(sample=sample, reward=reward, loss_mask=mask_of(sample))
            for sample, reward in zip(samples, rewards, strict=True)
        ),
    )


def episode_batch(seed: int = 0, *, groups: int = 3, turn_rewards: bool = False, step: int = 0) -> Batch:
    """Uneven groups: rollouts of one to three samples, each of one to three turns, some with a prompt of their own."""
    rng = random.Random(seed)
    return Batch(step=step, groups=tuple(_random_group(number, rng, turn_rewards) for number in range(groups)))


def _random_group(number: int, rng: random.Random, turn_rewards: bool) -> ScoredGroup:
    samples: list[Sample] = []
    for rollout in range(rng.randint(2, 3)):
        for _ in range(rng.randint(1, 3)):
            num_turns = rng.randint(1, 3)
            stretches: list[Stretch] = []
            for _ in range(num_turns):
                stretches += [("turn", rng.randint(1, 6)), ("observation", rng.randint(0, 5))]
            own = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))) if rng.random() < 0.5 else None
            rewards = [rng.choice([None, 0.0, 1.0]) for _ in range(num_turns)] if turn_rewards else ()
            samples.append(
                sample_of(stretches, rng, index=len(samples), rollout=rollout, prompt_ids=own, turn_rewards=rewards)
            )
    return group_of(number, samples, [float(rng.randrange(3)) for _ in samples], rng)


def unknown(batch: Batch, share: float = 0.4, seed: int = 0) -> Batch:
    """The batch with a NaN in place of some log-probs of turns."""
    rng = random.Random(seed)

    def changed(scored: ScoredSample) -> ScoredSample:
        pairs = zip(scored.sample.logprobs, scored.loss_mask, strict=True)
        logprobs = array("f", [math.nan if counts and rng.random() < share else known for known, counts in pairs])
        return replace(scored, sample=replace(scored.sample, logprobs=logprobs))

    groups = (replace(group, samples=tuple(map(changed, group.samples))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def known(batch: Batch, rows: Sequence[Sequence[float]]) -> Batch:
    """The batch with the log-probs of ``rows``, in batch order, in place of unknown ones."""
    flat = iter(rows)

    def changed(scored: ScoredSample) -> ScoredSample:
        pairs = zip(scored.sample.logprobs, next(flat), strict=True)
        logprobs = array("f", [row if math.isnan(old) else old for old, row in pairs])
        return replace(scored, sample=replace(scored.sample, logprobs=logprobs))

    groups = [replace(group, samples=tuple(map(changed, group.samples))) for group in batch.groups]
    return replace(batch, groups=tuple(groups))


def with_sets(batch: Batch, share: float = 0.6, seed: int = 0) -> Batch:
    """The batch with kept and likeliest ids for a share of its generated tokens; all other sets are empty."""
    rng = random.Random(seed)

    def changed(scored: ScoredSample) -> ScoredSample:
        sample = scored.sample
        wrote = {place for turn in sample.turns for place in range(turn.start, turn.stop)}
        kept, top = [], []
        for place, token in enumerate(sample.token_ids):
            others = [other for other in rng.sample(range(VOCAB), 7) if other != token]
            is_limited = place in wrote and rng.random() < share
            kept.append([token, *others[: rng.randint(0, 6)]] if is_limited else [])
            # Most kept ids stay unknown: a policy whose tail is all but empty would make the loss ill-conditioned.
            known = kept[-1][: len(kept[-1]) // 3] if is_limited else [token, *others]
            top.append(known[:4] if place in wrote and rng.random() < share else [])
        sets = replace(sample, kept=sets_of(kept, None), top=sets_of(top, rng))
        return replace(scored, sample=sets)

    groups = (replace(group, samples=tuple(map(changed, group.samples))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def sets_of(ids: Sequence[Sequence[int]], rng: random.Random | None) -> TokenSets:
    """Sets of ids, with random log-probs if there is a source of them."""
    flat = [each for one in ids for each in one]
    return TokenSets(
        counts_T=np.array([*map(len, ids)], np.int32),
        ids_I=np.array(flat, np.int32),
        logprobs_I=None if rng is None else np.array([rng.uniform(-6.0, -2.0) for _ in flat], np.float32),
    )
