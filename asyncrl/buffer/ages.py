"""How old the tokens of a group are, and leaving the too old ones out of its loss."""

import dataclasses
from itertools import chain

from asyncrl.types import ScoredGroup, ScoredSample


def masked_before(group: ScoredGroup, step: int) -> ScoredGroup:
    """``group`` with every token out of its loss that weights of fewer than ``step`` training steps wrote."""
    if all(scored.sample.spans[0].weights.step >= step for scored in group.samples if scored.sample.spans):
        return group  # spans are in order: the first is the oldest
    return dataclasses.replace(group, samples=tuple(_masked(scored, step) for scored in group.samples))


def oldest_trained(group: ScoredGroup) -> int | None:
    """The fewest training steps behind any token that is in the loss; None when none is."""
    steps = [
        span.weights.step
        for scored in group.samples
        for span in scored.sample.spans
        if any(scored.loss_mask[span.start : span.stop])
    ]
    return min(steps, default=None)


def _masked(scored: ScoredSample, step: int) -> ScoredSample:
    spans = scored.sample.spans
    kept = (
        scored.loss_mask[span.start : span.stop] if span.weights.step >= step else (0,) * (span.stop - span.start)
        for span in spans
    )
    return dataclasses.replace(scored, loss_mask=tuple(chain.from_iterable(kept)))
