"""Packing of samples into microbatches, in plain lists and numpy: the same input gives the same result.

The response of an episode has turns, which the policy wrote, and observations, which it did not.  Observations are
context: nothing is predicted there, so they need no logits.

A sample of P prompt and R response tokens enters a model as its first P + R - 1 tokens: nothing is predicted from the
last one.  Response token t is predicted at position P + t - 1.  Where ranks share tokens, samples are padded at their
ends to sizes that can be shared.  No token of a sample attends to the padding, and nothing is predicted from it.
Shape letters: T tokens of a microbatch, S its samples, R its response tokens, sample after sample; M those of them that
one context-parallel rank has.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.areas import TrainConfig
from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.config.derived import use_dynamic_batch_size
from asyncrl.token_columns import Routes, TokenSets, joined_sets
from asyncrl.types import Batch, Sample, ScoredGroup

Floats = NDArray[np.float32]
"""One number per response token of a sample, or of all samples of a microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sample in the form that the loss needs.  A field of ``None`` is absent, or not computed yet."""

    index: int
    """Index in its batch."""
    token_ids: tuple[int, ...]
    """Tokens of the prompt, then of the response."""
    num_response: int
    loss_mask: tuple[int, ...]
    behaviour_logprobs: Sequence[float]
    """Log-probs of the response tokens under the engine that sampled them; NaN where they are unknown."""
    is_generated: NDArray[np.bool_] | None = None
    """True at response tokens that the policy wrote; ``None``: all of them."""
    turns: tuple[tuple[int, int], ...] = ()
    """First response token and end of each turn of an episode."""
    lags: tuple[tuple[int, int, int], ...] = ()
    """Lag, first response token and end of each span of response tokens of one lag."""
    rollout_tokens: int | None = None
    """Tokens in the loss over all samples of the same rollout; ``None``: the sample is the only one."""
    advantages: Floats | None = None
    proximal_logprobs: Floats | None = None
    """Log-probs under the trainer's weights at the start of the step; ``None``: those of the same pass."""
    ref_logprobs: Floats | None = None
    """Log-probs under the reference model."""
    values: Floats | None = None
    """Values of the critic at the start of the step."""
    returns: Floats | None = None
    """Regression targets of the critic."""
    kept: TokenSets | None = None
    """See ``Sample.kept``."""
    top: TokenSets | None = None
    """See ``Sample.top``."""
    routes: Routes | None = None
    """Experts that the engine chose at each token that enters the model."""

    def __post_init__(self) -> None:
        if not 0 < self.num_response < len(self.token_ids):
            raise ValueError(
                f"a response of {self.num_response} in {len(self.token_ids)} tokens: "
                "neither the response nor its prompt may be empty"
            )
        if self.routes is not None and len(self.routes) != self.num_inputs:
            raise ValueError(
                f"routes of {len(self.routes)} positions for {self.num_inputs} tokens that enter the model"
            )

    @property
    def num_inputs(self) -> int:
        """The number of tokens that enter the model."""
        return len(self.token_ids) - 1

    @property
    def num_trained(self) -> int:
        """The number of tokens in the loss."""
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Samples packed into one row."""

    indices: tuple[int, ...]
    """Indices of the samples in their batch."""
    lengths: tuple[int, ...]
    """Number of response tokens of each sample."""
    totals: tuple[int, ...]
    """Number of tokens of each sample's prompt and response."""
    rollout_tokens: tuple[int, ...]
    """Number of tokens in the loss over all samples of each sample's rollout."""
    token_ids_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    edges: NDArray[np.int32]
    """Offsets of the samples in the row, padding included, followed by the end of the last one: S + 1 numbers."""
    longest: int
    """Number of tokens of the longest sample, padding included."""
    sources_R: NDArray[np.int64]
    """Position in the row at which each response token is predicted."""
    targets_R: NDArray[np.int64]
    mask_R: NDArray[np.bool_]
    behaviour_logprobs_R: Floats
    is_generated_R: NDArray[np.bool_] | None = None
    """True at tokens that the policy wrote; ``None``: all of them."""
    advantages_R: Floats | None = None
    proximal_logprobs_R: Floats | None = None
    ref_logprobs_R: Floats | None = None
    values_R: Floats | None = None
    returns_R: Floats | None = None
    kept: TokenSets | None = None
    """The ids among which each response token was drawn; None: all tokens from the whole vocabulary."""
    top: TokenSets | None = None
    """The likeliest ids at each response token; None: none are known."""
    routes: tuple[Routes | None, ...] | None = None
    """Routes of each sample, not copied; ``None``: no sample has any."""


def examples_of(batch: Batch) -> list[list[Example]]:
    """Collect the samples of each group that have tokens, in batch order."""
    examples: list[list[Example]] = []
    index = 0
    for group in batch.groups:
        examples.append([])
        trained = Counter[int]()
        for scored in group.samples:
            trained[scored.sample.rollout] += sum(scored.loss_mask)
        for scored in group.samples:
            sample = scored.sample
            if sample.token_ids:
                example = Example(
                    index=index,
                    token_ids=prompt_of(group, sample) + sample.token_ids,
                    num_response=len(sample.token_ids),
                    loss_mask=scored.loss_mask,
                    behaviour_logprobs=sample.logprobs,
                    is_generated=_is_generated(sample),
                    turns=tuple((turn.start, turn.stop) for turn in sample.turns),
                    lags=tuple((batch.step - span.weights.step, span.start, span.stop) for span in sample.spans),
                    rollout_tokens=trained[sample.rollout],
                    kept=sample.kept,
                    top=sample.top,
                    routes=sample.routes,
                )
                examples[-1].append(example)
            index += 1
    return examples


def prompt_of(group: ScoredGroup, sample: Sample) -> tuple[int, ...]:
    """Return the tokens before the first response token of a sample."""
    return group.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids


def _is_generated(sample: Sample) -> NDArray[np.bool_] | None:
    """Mark the tokens of turns; None if there are no others."""
    if not sample.num_observed:
        return None
    marks = np.zeros(len(sample.token_ids), np.bool_)
    for turn in sample.turns:
        marks[turn.start : turn.stop] = True
    return marks


def contiguous_parts(num_items: int, num_parts: int) -> list[slice]:
    """Cut ``num_items`` items into parts whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(num_items, num_parts)
    edges = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Assign items to bins of at most ``max_tokens``, and return the indices in each bin.  First fit, longest first.

    An item longer than ``max_tokens`` has a bin for itself.  Indices ascend within a bin, and the bins are in the order
    of their first indices.  First fit decreasing needs at most 11/9 of the fewest bins, plus one.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        fitting = next((number for number, room in enumerate(free) if lengths[place] <= room), len(bins))
        if fitting == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[fitting].append(place)
        free[fitting] -= lengths[place]
    return sorted(sorted(places) for places in bins)


def even_parts(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Assign items to parts of about the same sum: longest first, each to the part with the smallest sum so far.

    The largest sum exceeds the mean by less than one item: the last that the part got, which is one of its shortest.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [0] * num_parts
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        least = sums.index(min(sums))
        parts[least].append(place)
        sums[least] += lengths[place]
    return [sorted(places) for places in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The distribution of samples over ranks and microbatches.  It depends on their lengths and order alone."""

    max_tokens: int
    """Maximum of input tokens in a microbatch, the padding of its samples included."""
    num_samples: int | None = None
    """Samples per microbatch, whatever their lengths; ``None``: as many as ``max_tokens`` allows."""
    is_balanced: bool = False
    """True: ranks get samples with about equally many tokens.  False: each rank gets every n-th sample."""
    context_parallel: int = 1
    """Number of ranks that share the tokens of each sample."""
    tensor_parallel: int = 1
    """Number of ranks that share the tokens of each row between the layers."""

    @property
    def sample_multiple(self) -> int:
        """The multiple to which samples are padded: each context-parallel rank gets two pieces of the same size."""
        return 2 * self.context_parallel if self.context_parallel > 1 else 1

    @property
    def row_multiple(self) -> int:
        """The multiple to which rows are padded: tensor-parallel ranks share a context-parallel rank's part."""
        return self.context_parallel * math.lcm(self.tensor_parallel, 2 if self.context_parallel > 1 else 1)

    def halved(self) -> "Packing":
        """Return a packing into microbatches of half the size.  A sample that is longer has one for itself."""
        num_samples = None if self.num_samples is None else max(1, self.num_samples // 2)
        return replace(self, max_tokens=max(1, self.max_tokens // 2), num_samples=num_samples)

    def shares(self, examples: Sequence[Example], world_size: int) -> list[Sequence[Example]]:
        """Distribute the samples over ranks."""
        if not self.is_balanced:
            return [examples[rank::world_size] for rank in range(world_size)]
        parts = even_parts([example.num_inputs for example in examples], world_size)
        return [[examples[place] for place in places] for places in parts]

    def bins(self, examples: Sequence[Example]) -> list[list[Example]]:
        """Group a rank's samples into microbatches."""
        if self.num_samples is not None:
            return [list(examples[at : at + self.num_samples]) for at in range(0, len(examples), self.num_samples)]
        places = pack([_filled(example.num_inputs, self.sample_multiple) for example in examples], self.max_tokens)
        return [[examples[place] for place in each] for each in places]


def packing_of(train: TrainConfig, parallel: ParallelConfig) -> Packing:
    """Build the ``Packing`` that the flags ask for."""
    return Packing(
        max_tokens=train.max_tokens_per_gpu * parallel.context_parallel_size,
        num_samples=None if use_dynamic_batch_size(train) else train.micro_batch_size or 1,
        is_balanced=train.balance_data,
        context_parallel=parallel.context_parallel_size,
        tensor_parallel=parallel.tensor_model_parallel_size,
    )


def microbatches(examples: Sequence[Example], rank: int, world_size: int, packing: Packing) -> list[Microbatch]:
    """Pack the share of one rank into microbatches.

    Every rank gets the same number of microbatches, at least one, so that the collectives inside a pass match.  Some of
    them may be empty.
    """
    packed = [packing.bins(share) for share in packing.shares(examples, world_size)]
    mine = [_row(each, packing) for each in packed[rank]]
    return mine + [_empty(packing)] * (max(1, *map(len, packed)) - len(mine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a row that one context-parallel rank has."""

    places_T: NDArray[np.int64]
    """Positions in the row, in the rank's order.  Each sample gives two pieces, one from its front and one from its
    back.  A later token costs attention more, so this gives every rank the same work."""
    sources_M: NDArray[np.int64]
    """Indices among the rank's own tokens at which its M response tokens are predicted; observations are not."""
    mine_M: NDArray[np.int64]
    """Indices of these response tokens among those of the row."""


def part_of(row: Microbatch, rank: int, num_ranks: int) -> Part:
    """Select the part of a context-parallel rank; a single rank gets the whole row, in order."""
    is_generated_R = np.ones(len(row.sources_R), np.bool_) if row.is_generated_R is None else row.is_generated_R
    if num_ranks == 1:
        mine_M = np.flatnonzero(is_generated_R)
        return Part(places_T=np.arange(len(row.token_ids_T)), sources_M=row.sources_R[mine_M], mine_M=mine_M)
    halves = np.diff(row.edges) // (2 * num_ranks)
    places = [
        np.arange(start + piece * half, start + (piece + 1) * half)
        for start, half in zip(row.edges, halves, strict=False)
        for piece in (rank, 2 * num_ranks - 1 - rank)
    ]
    places_T = np.concatenate(places).astype(np.int64)
    own_T = np.full(len(row.token_ids_T), -1, np.int64)
    own_T[places_T] = np.arange(len(places_T))
    sources_R = own_T[row.sources_R]
    mine_M = np.flatnonzero((sources_R >= 0) & is_generated_R)
    return Part(places_T=places_T, sources_M=sources_R[mine_M], mine_M=mine_M)


def _row(examples: Sequence[Example], packing: Packing) -> Microbatch:
    inputs = [example.num_inputs for example in examples]
    sizes = [_filled(size, packing.sample_multiple) for size in inputs]
    sizes[-1] += -sum(sizes) % packing.row_multiple
    edges = np.concatenate([[0], np.cumsum(sizes)])
    lengths = [example.num_response for example in examples]
    token_ids_T = np.zeros(edges[-1], np.int64)
    for example, start in zip(examples, edges, strict=False):
        token_ids_T[start : start + example.num_inputs] = example.token_ids[:-1]
    ends = edges[:-1] + inputs
    return Microbatch(
        indices=tuple(example.index for example in examples),
        lengths=tuple(lengths),
        totals=tuple(len(example.token_ids) for example in examples),
        rollout_tokens=tuple(e.num_trained if e.rollout_tokens is None else e.rollout_tokens for e in examples),
        token_ids_T=token_ids_T,
        positions_T=np.concatenate([np.arange(size) for size in sizes]),
        edges=edges.astype(np.int32),
        longest=max(sizes),
        sources_R=np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]),
        targets_R=np.concatenate([np.array(e.token_ids[-e.num_response :], np.int64) for e in examples]),
        mask_R=np.concatenate([np.array(example.loss_mask, np.bool_) for example in examples]),
        behaviour_logprobs_R=np.concatenate([np.array(e.behaviour_logprobs, np.float32) for e in examples]),
        is_generated_R=_generated(examples),
        advantages_R=_joined([example.advantages for example in examples]),
        proximal_logprobs_R=_joined([example.proximal_logprobs for example in examples]),
        ref_logprobs_R=_joined([example.ref_logprobs for example in examples]),
        values_R=_joined([example.values for example in examples]),
        returns_R=_joined([example.returns for example in examples]),
        kept=joined_sets([(example.num_response, example.kept) for example in examples]),
        top=joined_sets([(example.num_response, example.top) for example in examples]),
        routes=tuple(e.routes for e in examples) if any(e.routes is not None for e in examples) else None,
    )


def _generated(examples: Sequence[Example]) -> NDArray[np.bool_] | None:
    if all(example.is_generated is None for example in examples):
        return None
    marks = [np.ones(e.num_response, np.bool_) if e.is_generated is None else e.is_generated for e in examples]
    return np.concatenate(marks)


def _joined(rows: Sequence[Floats | None]) -> Floats | None:
    """Concatenate rows that either all samples have or none has."""
    there = [row for row in rows if row is not None]
    assert len(there) in (0, len(rows)), f"{len(there)} of {len(rows)} samples have a row of numbers, not all or none"
    return np.concatenate(there) if there else None


def _filled(size: int, multiple: int) -> int:
    return size + -size % multiple


def _empty(packing: Packing) -> Microbatch:
    """A microbatch of as few tokens as possible, none of which predicts anything.

    It takes little time and adds nothing to a gradient.
    """
    size = packing.row_multiple
    nothing = np.zeros(0, np.float32)
    return Microbatch(
        indices=(),
        lengths=(),
        totals=(),
        rollout_tokens=(),
        token_ids_T=np.zeros(size, np.int64),
        positions_T=np.arange(size),
        edges=np.array([0, size], np.int32),
        longest=size,
        sources_R=np.zeros(0, np.int64),
        targets_R=np.zeros(0, np.int64),
        mask_R=np.zeros(0, np.bool_),
        behaviour_logprobs_R=nothing,
        advantages_R=nothing,
        proximal_logprobs_R=nothing,
        ref_logprobs_R=nothing,
        values_R=nothing,
        returns_R=nothing,
    )
