"""The optimizer updates of one training step: their samples, and the divisors of their losses."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from asyncrl.engines.megatron.model.packing import Example, contiguous_parts, examples_of
from asyncrl.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The samples of one optimizer update, on all ranks together."""

    examples: tuple[Example, ...]
    num_samples: int
    """Number of samples, including those without tokens."""

    def changed(self, examples: Iterable[Example]) -> "Update":
        """Return the update with these examples in place of those with the same index; others are ignored."""
        by_index = {example.index: example for example in examples}
        return replace(self, examples=tuple(by_index.get(example.index, example) for example in self.examples))

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the loss mask lets through."""
        return sum(sum(example.loss_mask) for example in self.examples)

    def count(self, *, per_token: bool) -> int:
        """Return the divisor of the sum of weighted losses: tokens if ``per_token``, else samples; at least 1."""
        return max(1, self.num_tokens if per_token else self.num_samples)


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
            num_samples=sum(len(group.samples) for group in batch.groups[part]),
        )
        for part in contiguous_parts(len(batch.groups), num_updates)
    ]
