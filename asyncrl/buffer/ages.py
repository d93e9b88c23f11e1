"""How old the tokens of a group are, and leaving the too old ones out of its loss."""

import dataclasses

from asyncrl.types import ScoredGroup, ScoredSample


def masked_before(group: ScoredGroup, step: int) -> ScoredGroup:
    """``group`` with every token out of its loss that weights of fewer than ``step`` training steps wrote."""
    if all(scored.sample.spans[0].weights.step >= step for scored in group.samples if scored.sample.spans):
        return group  # spans are in order: the first is the oldest
    return dataclasses.replace(group, samples=tuple(_masked(scored, step) for scored in group.samples))


def masked_until(scored: ScoredSample, stop: int) -> ScoredSample:
    """``scored`` with its first ``stop`` tokens out of the loss."""
    return dataclasses.replace(scored, loss_mask=(0,) * stop + scored.loss_mask[stop:])


def _masked(scored: ScoredSample, step: int) -> ScoredSample:
    """Spans are in order: what follows the first young one is young."""
    spans, end = scored.sample.spans, len(scored.loss_mask)
    return masked_until(scored, next((span.start for span in spans if span.weights.step >= step), end))
