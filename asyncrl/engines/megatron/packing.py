"""Samples into packed microbatches: plain lists and numpy, the same result for the same input.

A sample of P prompt and R response tokens enters a model as its first P + R - 1 tokens: nothing is predicted from the
last one, and response token t is predicted at position P + t - 1.
Shape letters: T tokens of a microbatch, S its samples, R its response tokens, sample behind sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One sample, as the loss sees it."""

    index: int
    """Place in its batch."""
    token_ids: tuple[int, ...]
    """Prompt and response."""
    num_response: int
    loss_mask: tuple[int, ...]
    advantage: float
    old_logprobs: tuple[float, ...] | None
    """What the ratio is taken against; ``None``: the log-probs of this very pass."""

    def __post_init__(self) -> None:
        if not 0 < self.num_response < len(self.token_ids):
            raise ValueError(
                f"a response of {self.num_response} in {len(self.token_ids)} tokens: "
                "neither it nor its prompt may be empty"
            )

    @property
    def num_inputs(self) -> int:
        """Tokens that enter the model."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Samples in one row."""

    indices: tuple[int, ...]
    """Places of the samples in their batch."""
    lengths: tuple[int, ...]
    """Response tokens of each sample."""
    token_ids_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    edges: NDArray[np.int32]
    """Where the samples begin, and where the last one ends: S + 1 numbers."""
    longest: int
    """Input tokens of the longest sample."""
    sources_R: NDArray[np.int64]
    """Positions in the row at which each response token is predicted."""
    targets_R: NDArray[np.int64]
    mask_R: NDArray[np.bool_]
    advantages_R: NDArray[np.float32]
    old_logprobs_R: NDArray[np.float32] | None


def examples_of(batch: Batch, advantages: Sequence[float], *, against_rollout: bool) -> list[list[Example]]:
    """The samples of each group that have tokens, in batch order; ``advantages`` has one number per sample."""
    examples: list[list[Example]] = []
    index = 0
    for group in batch.groups:
        examples.append([])
        for scored in group.samples:
            sample = scored.sample
            if sample.token_ids:
                example = Example(
                    index=index,
                    token_ids=group.prompt.token_ids + sample.token_ids,
                    num_response=len(sample.token_ids),
                    loss_mask=scored.loss_mask,
                    advantage=advantages[index],
                    old_logprobs=sample.logprobs if against_rollout else None,
                )
                examples[-1].append(example)
            index += 1
    return examples


def contiguous_parts(num_items: int, num_parts: int) -> list[slice]:
    """Cut a row into parts whose sizes differ by at most one, the larger ones first."""
    size, extra = divmod(num_items, num_parts)
    edges = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Places of items in bins of at most ``max_tokens``: first fit, longest first.

    An item that is longer than that has a bin of its own.  Within a bin, and among bins by their first item, places
    ascend.  First fit decreasing needs at most 11/9 of the fewest bins, plus one.
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


def microbatches(examples: Sequence[Example], rank: int, world_size: int, max_tokens: int) -> list[Microbatch]:
    """The microbatches of one rank: every ``world_size``-th sample, packed.

    Every rank has as many as the others, some of them empty, so that collectives inside a pass would meet; and at
    least one.
    """
    shares = [examples[start::world_size] for start in range(world_size)]
    packed = [pack([example.num_inputs for example in share], max_tokens) for share in shares]
    mine = [_row([shares[rank][place] for place in places]) for places in packed[rank]]
    return mine + [_EMPTY] * (max(1, *map(len, packed)) - len(mine))


def _row(examples: Sequence[Example]) -> Microbatch:
    inputs = [example.num_inputs for example in examples]
    edges = np.concatenate([[0], np.cumsum(inputs)])
    lengths = [example.num_response for example in examples]
    old = [np.array(example.old_logprobs, np.float32) for example in examples if example.old_logprobs is not None]
    return Microbatch(
        indices=tuple(example.index for example in examples),
        lengths=tuple(lengths),
        token_ids_T=np.concatenate([np.array(example.token_ids[:-1], np.int64) for example in examples]),
        positions_T=np.concatenate([np.arange(size) for size in inputs]),
        edges=edges.astype(np.int32),
        longest=max(inputs),
        sources_R=np.concatenate(
            [np.arange(stop - length, stop) for stop, length in zip(edges[1:], lengths, strict=True)]
        ),
        targets_R=np.concatenate([np.array(e.token_ids[-e.num_response :], np.int64) for e in examples]),
        mask_R=np.concatenate([np.array(example.loss_mask, np.bool_) for example in examples]),
        advantages_R=np.repeat(np.array([example.advantage for example in examples], np.float32), lengths),
        old_logprobs_R=np.concatenate(old) if len(old) == len(examples) else None,
    )


_EMPTY = Microbatch(
    indices=(),
    lengths=(),
    token_ids_T=np.zeros(1, np.int64),
    positions_T=np.zeros(1, np.int64),
    edges=np.array([0, 1], np.int32),
    longest=1,
    sources_R=np.zeros(0, np.int64),
    targets_R=np.zeros(0, np.int64),
    mask_R=np.zeros(0, np.bool_),
    advantages_R=np.zeros(0, np.float32),
    old_logprobs_R=None,
)
"""One token from which nothing is predicted: it costs next to nothing and adds nothing to a gradient."""
