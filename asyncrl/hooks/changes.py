"""The changes that hooks make to a batch, and the checks of these changes."""

from collections.abc import Sequence
from dataclasses import replace

from asyncrl.errors import HookFailed
from asyncrl.types import Batch, ScoredGroup, ScoredSample, is_usable


def with_samples(batch: Batch, samples: Sequence[ScoredSample]) -> Batch:
    """Return ``batch`` with other samples, given in batch order."""
    rest = iter(samples)
    groups = tuple(replace(group, samples=tuple(next(rest) for _ in group.samples)) for group in batch.groups)
    return replace(batch, groups=groups)


def samples_of(batch: Batch) -> list[ScoredSample]:
    """Return all samples in batch order."""
    return [scored for group in batch.groups for scored in group.samples]


def left_out(scored: ScoredSample) -> ScoredSample:
    """Return the sample with no token in the loss."""
    return replace(scored, loss_mask=(0,) * len(scored.loss_mask)) if any(scored.loss_mask) else scored


def masked(scored: ScoredSample, mask: Sequence[int], name: str) -> ScoredSample:
    """Return the sample with ``mask``; tokens that are masked already stay masked.  Raises HookFailed."""
    if len(mask) != len(scored.loss_mask):
        raise HookFailed(f"{name}: the loss mask has {len(mask)} entries for {len(scored.loss_mask)} response tokens")
    wrong = [value for value in mask if value not in (0, 1)]
    if wrong:
        raise HookFailed(f"{name}: a loss mask must have 0 and 1 alone, got {wrong[0]!r}")
    both = tuple(int(old and new) for old, new in zip(scored.loss_mask, mask, strict=True))
    return scored if both == scored.loss_mask else replace(scored, loss_mask=both)


def number(value: object, name: str) -> float:
    """Return a usable number.  Raises HookFailed."""
    plain = value.item() if hasattr(value, "item") else value
    if is_usable(plain):
        return float(plain)
    raise HookFailed(f"{name} must be a number from -1e15 to 1e15, got {value!r:.80}")


def name_of_sample(group: ScoredGroup, index: int) -> str:
    """Return the name of a sample in errors."""
    return f"sample {index} of group {group.group_id} (row {group.prompt.row})"
