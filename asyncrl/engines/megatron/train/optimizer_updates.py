"""The optimiser updates of one training step: which samples, and over what their loss is averaged."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

from asyncrl.engines.megatron.model.packing import Example, contiguous_parts, examples_of
from asyncrl.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one optimiser update is made of, on all ranks together."""

    examples: tuple[Example, ...]
    num_samples: int
    """Those without tokens included."""

    def changed(self, examples: Iterable[Example]) -> "Update":
        """With these in the place of those of the same index; others are passed over."""
        by_index = {example.index: example for example in examples}
        return replace(self, examples=tuple(by_index.get(example.index, example) for example in self.examples))

    @property
    def num_tokens(self) -> int:
        """Tokens that the loss mask lets through."""
        return sum(sum(example.loss_mask) for example in self.examples)

    def count(self, *, per_token: bool) -> int:
        """What a sum of weighted losses is divided by."""
        return max(1, self.num_tokens if per_token else self.num_samples)


def updates_of(batch: Batch, num_updates: int) -> list[Update]:
    """The batch's groups, in order, as one contiguous part for each optimiser update."""
    if num_updates > len(batch.groups):
        raise ValueError(f"{num_updates} optimiser updates need as many groups, the batch has {len(batch.groups)}")
    examples = examples_of(batch)
    return [
        Update(
            examples=tuple(chain(*examples[part])),
            num_samples=sum(len(group.samples) for group in batch.groups[part]),
        )
        for part in contiguous_parts(len(batch.groups), num_updates)
    ]
