"""Groups and records for tests: random ones that have every field, and plain ones."""

import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from asyncrl.buffer import Dispatch
from asyncrl.buffer.journal import Finished, Grown, HeldGroup, PromptPlace
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import (
    Chunk,
    FinishReason,
    GroupId,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    Turn,
    Weights,
)
from tests.unit.scored_groups import group

# ---- plain


def place(row: int, epoch: int = 0) -> PromptPlace:
    return PromptPlace(epoch=epoch, row=row)


def grown(group_id: int, start: int, stop: int, index: int = 0) -> Grown:
    chunk = Chunk(token_ids=tuple(range(start, stop)), logprobs=array("f", [-1.0] * (stop - start)), version=0)
    weights = Weights(version=0, step=0)
    return Grown(group_id=GroupId(group_id), index=index, start=start, weights=weights, chunk=chunk)


def finished(group_id: int, *, order: int = 0, deadline: int = 9, tokens: int = 3, reward: float = 1.0) -> Finished:
    dispatch = Dispatch(order=order or group_id, deadline=deadline, group_id=GroupId(group_id))
    return Finished(dispatch=dispatch, group=group(group_id, [reward, 0.0], [tokens, tokens]))


def held(group_id: int, *, is_buffered: bool) -> HeldGroup:
    return HeldGroup(group_id=GroupId(group_id), place=place(group_id), is_buffered=is_buffered)


# ---- equality of every bit


def bits(value: Any) -> Any:
    """Return a value that is equal to another one only if every bit and type is."""
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        return type(value).__name__, [(each.name, bits(getattr(value, each.name))) for each in fields(value)]
    if isinstance(value, Mapping):
        return [(key, bits(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(each) for each in value]
    return type(value).__name__, value


# ---- random

FLOATS = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -0.0])
TEXTS = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\udc80b", "\ud83d\ude00", "\x00"])
"""Also halves of characters, one after another."""
WHOLE_TEXTS = st.text(max_size=8) | st.just("a\udc80b")
IDS = st.integers(0, 2**32 - 1)
ONE_NAN = st.floats(allow_nan=False) | st.just(math.nan)
"""JSON has one NaN; columns have all."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | ONE_NAN | WHOLE_TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WHOLE_TEXTS, inner, max_size=3),
    max_leaves=5,
)
METADATA = st.dictionaries(WHOLE_TEXTS, VALUES, max_size=3)
WEIGHTS = st.builds(Weights, version=st.integers(0, 9), step=st.integers(0, 9))


@st.composite
def token_sets(draw: st.DrawFn, num_tokens: int) -> TokenSets:
    counts = np.array(draw(st.lists(st.integers(0, 3), min_size=num_tokens, max_size=num_tokens)), np.int32)
    total = int(counts.sum())
    ids = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=total, max_size=total)), np.int32)
    logprobs = np.array(draw(st.lists(FLOATS, min_size=total, max_size=total)), np.float32)
    return TokenSets(counts_T=counts, ids_I=ids, logprobs_I=logprobs if draw(st.booleans()) else None)


@st.composite
def routes(draw: st.DrawFn, num_positions: int) -> Routes:
    shape = (num_positions, draw(st.integers(0, 3)), draw(st.integers(1, 3)))
    kind = draw(st.sampled_from([np.uint8, np.uint16]))
    experts = np.arange(math.prod(shape), dtype=kind).reshape(shape)
    start = draw(st.integers(0, num_positions))
    missing = ((start, num_positions),) if draw(st.booleans()) else ()
    return Routes(experts_NLK=experts[::-1] if draw(st.booleans()) else experts, missing=missing)


def edges(num_tokens: int) -> st.SearchStrategy[list[int]]:
    """Return places that cut tokens into parts, which may be empty."""
    return st.lists(st.integers(0, num_tokens), max_size=4).map(lambda cuts: [0, *sorted(cuts), num_tokens])


@st.composite
def scored_samples(draw: st.DrawFn, index: int = 0) -> ScoredSample:
    num_tokens = draw(st.integers(0, 20))
    parts = list(pairwise(draw(edges(num_tokens))))
    is_episode = draw(st.booleans()) and len(parts) > 1
    in_turns = parts[::2] if is_episode else parts
    turns = (
        Turn(
            call=number,
            start=start,
            stop=stop,
            finish=draw(st.sampled_from(FinishReason)),
            reward=draw(st.none() | st.floats()),
        )
        for number, (start, stop) in enumerate(in_turns)
    )
    mask = draw(st.lists(st.integers(0, 1), min_size=num_tokens, max_size=num_tokens) | st.just([1] * num_tokens))
    if is_episode:
        inside = {place for start, stop in in_turns for place in range(start, stop)}
        mask = [each if place in inside else 0 for place, each in enumerate(mask)]
    prompt_ids = draw(st.none() | st.lists(IDS, min_size=1, max_size=3).map(tuple))
    has_routes = prompt_ids is not None and draw(st.booleans())
    sample = Sample(
        index=index,
        group_id=draw(st.none() | st.integers(0, 2**60).map(GroupId)),
        token_ids=tuple(draw(st.lists(IDS, min_size=num_tokens, max_size=num_tokens))),
        logprobs=array("f", draw(st.lists(FLOATS, min_size=num_tokens, max_size=num_tokens))),
        spans=tuple(Span(weights=draw(WEIGHTS), start=start, stop=stop) for start, stop in in_turns),
        turns=tuple(turns) if is_episode else (),
        text=draw(TEXTS),
        finish=draw(st.sampled_from(FinishReason)),
        seconds=draw(st.floats()),
        resumed_at=draw(st.integers(0, num_tokens)),
        prompt_ids=prompt_ids,
        rollout_index=draw(st.none() | st.integers(0, 9)),
        metadata=draw(METADATA),
        routes=draw(routes(len(prompt_ids or ()) + num_tokens - 1)) if has_routes else None,
        kept=draw(st.none() | token_sets(num_tokens)),
        top=draw(st.none() | token_sets(num_tokens)),
    )
    return ScoredSample(
        sample=sample,
        reward=draw(st.floats()),
        loss_mask=tuple(mask),
        reward_parts=draw(METADATA),
        outcome=draw(st.none() | st.floats()),
    )


def prompts(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Prompt]:
    return st.builds(
        Prompt,
        row=st.integers(0, 2**62),
        epoch=st.integers(0, 9),
        text=texts,
        token_ids=st.lists(IDS, max_size=4).map(tuple),
        label=VALUES,
        metadata=METADATA,
        messages=st.none() | st.lists(METADATA, max_size=2).map(tuple),
        template_variables=METADATA,
    )


PLACES = st.builds(
    PromptPlace, epoch=st.integers(0, 9), row=st.integers(0, 2**62), prompt=st.none() | prompts(WHOLE_TEXTS)
)


@st.composite
def grown_answers(draw: st.DrawFn) -> Grown:
    num_tokens = draw(st.integers(0, 20))
    chunk = Chunk(
        token_ids=tuple(draw(st.lists(IDS, min_size=num_tokens, max_size=num_tokens))),
        logprobs=array("f", draw(st.lists(FLOATS, min_size=num_tokens, max_size=num_tokens))),
        version=draw(st.integers(0, 9)),
        routes=draw(st.none() | st.integers(0, 5).flatmap(routes)),
        kept=draw(st.none() | token_sets(num_tokens)),
        top=draw(st.none() | token_sets(num_tokens)),
    )
    return Grown(
        group_id=GroupId(draw(st.integers(0, 2**60))),
        index=draw(st.integers(0, 99)),
        start=draw(st.integers(0, 2**20)),
        weights=draw(WEIGHTS),
        chunk=chunk,
        finish=draw(st.none() | st.sampled_from(FinishReason)),
    )


@st.composite
def finished_groups(draw: st.DrawFn) -> Finished:
    group_id = GroupId(draw(st.integers(0, 2**62)))
    samples = tuple(draw(scored_samples(index)) for index in range(draw(st.integers(0, 2))))
    return Finished(
        dispatch=Dispatch(order=draw(st.integers(0, 99)), deadline=draw(st.integers(0, 99)), group_id=group_id),
        group=ScoredGroup(
            group_id=group_id,
            prompt=draw(prompts(TEXTS)),
            dispatched=draw(WEIGHTS),
            samples=samples,
            num_generated=draw(st.none() | st.integers(0, 99)),
        ),
    )
