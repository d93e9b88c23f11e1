"""The optimizer updates of one training step: their samples, and the divisors of their losses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from asyncrl.engines.megatron.model.packing import Example, contiguous_parts, examples_of
from asyncrl.types import Batch, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The samples of one optimizer update, on all ranks together."""

    examples: tuple[Example, ...]
    num_rollouts: int
    """Number of rollouts, including those without tokens.  Several samples of one episode are one rollout."""

    def changed(self, examples: Iterable[Example]) -> "Update":
        """Return the update with these examples in place of those with the same index; others are ignored."""
        by_index = {example.index: example for example in examples}
        return replace(self, examples=tuple(by_index.get(example.index, example) for example in self.examples))

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the loss mask lets through."""
        return sum(example.num_trained for example in self.examples)

    def count(self, *, per_token: bool) -> int:
        """Return the divisor of the sum of weighted losses: tokens if ``per_token``, else rollouts; at least 1."""
        return max(1, self.num_tokens if per_token else self.num_rollouts)


def updates_of(batch: Batch, num_updates: int) -> list[Update]:
    """Split the batch's groups, in order, into one contiguous part per optimizer update.

    Raises ValueError if there are fewer groups than updates.
    """
    if num_updates > len(batch.groups):
        raise ValueError(f"{num_updates} optimizer updates need as many groups, the batch has {len(batch.groups)}")
    examples = examples_of(batch)
    return [
        Update(
            examples=tuple(chain(*examples[part])),
            num_rollouts=sum(map(_num_rollouts, batch.groups[part])),
        )
        for part in contiguous_parts(len(batch.groups), num_updates)
    ]


def unknown_share(updates: Sequence[Update]) -> float:
    """Return the share of trained tokens whose behaviour log-probs are unknown, 0 to 1."""
    unknown, total = 0, 0
    for update in updates:
        for example in update.examples:
            mask = np.array(example.loss_mask, np.bool_)
            unknown += int(np.isnan(np.asarray(example.behaviour_logprobs)[mask]).sum())
            total += int(mask.sum())
    return unknown / max(1, total)


def _num_rollouts(group: ScoredGroup) -> int:
    return len({scored.sample.rollout for scored in group.samples})
