"""A user's advantage and loss in the trainer: called, and what they return looked at.

Shape letters: N samples of a training step, R response tokens of a microbatch, sample behind sample.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.custom import AdvantageFn, Custom, LossFn, StepSamples
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.config.areas import TrainConfig
from asyncrl.config.derived import uses_reference
from asyncrl.engines.megatron.packing import Example, Floats
from asyncrl.engines.megatron.ranks import on_first_rank
from asyncrl.engines.megatron.settings import Resolver
from asyncrl.errors import NonFiniteLoss, PluginError, TrainerFailed
from asyncrl.types import Batch

CLIP_FRACTION = "clip_fraction"
"""The one number of a custom loss that has a place among ours."""


def custom_of(resolve: Resolver | None) -> Custom:
    """The user's functions, the loss tried once.  Raises PluginError."""
    custom = Custom() if resolve is None else resolve()
    return custom if custom.loss is None else Custom(advantage=custom.advantage, loss=CheckedLoss(custom.loss))


# ---- advantages


def custom_advantages(
    function: AdvantageFn | None,
    batch: Batch,
    outcomes_N: Tensor,
    mine: Sequence[Example],
    train: TrainConfig,
) -> list[Tensor] | None:
    """By place in the batch, an advantage for each token of each answer; None without a function.

    Every rank must call it, with its own samples.  The function runs on rank 0 alone, which sees all samples: whole
    groups, and one answer for all ranks whatever the function draws.  Raises TrainerFailed or NonFiniteLoss on
    all ranks alike.
    """
    if function is None:
        return None
    examples = list(chain(*on_first_rank(mine)))
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [_called(function, step_samples(batch, outcomes_N, examples, train))]
        except (TrainerFailed, NonFiniteLoss) as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], Exception):
        raise box[0]
    found: list[Tensor] = box[0]
    return found


def step_samples(batch: Batch, outcomes_N: Tensor, examples: Sequence[Example], train: TrainConfig) -> StepSamples:
    """All samples of ``batch``; those that have tokens are in ``examples``, in any order."""
    by_index = {example.index: example for example in examples}
    samples = [(group, scored) for group in batch.groups for scored in group.samples]
    there = [by_index.get(place) for place in range(len(samples))]
    proximal = _rows([None if each is None else each.proximal_logprobs for each in there])
    ref = kl = None
    if uses_reference(train):
        ref = _rows([None if each is None else each.ref_logprobs for each in there])
        kl = tuple(kl_estimate(train.kl_loss_type, p, r) for p, r in zip(proximal, ref, strict=True))
    return StepSamples(
        step=batch.step,
        rewards_N=torch.tensor([scored.reward for _, scored in samples], dtype=torch.float64),
        groups_N=torch.tensor([group.group_id for group, _ in samples]),
        outcomes_N=outcomes_N,
        token_ids=tuple(torch.tensor(group.prompt.token_ids + scored.sample.token_ids) for group, scored in samples),
        masks=tuple(torch.tensor(scored.loss_mask, dtype=torch.bool) for _, scored in samples),
        behaviour_logprobs=tuple(torch.tensor(scored.sample.logprobs, dtype=torch.float64) for _, scored in samples),
        proximal_logprobs=proximal,
        ref_logprobs=ref,
        kl=kl,
    )


def _rows(rows: Sequence[Floats | None]) -> tuple[Tensor, ...]:
    """A sample without tokens has none of anything."""
    return tuple(torch.from_numpy(np.zeros(0) if row is None else row).double() for row in rows)


def _called(function: AdvantageFn, samples: StepSamples) -> list[Tensor]:
    """Raises TrainerFailed, or NonFiniteLoss for numbers that no token can be trained with."""
    where = f"step {samples.step}: advantage function {_name(function)}"
    try:
        found = function(samples)
    except Exception as error:  # a user's function may raise anything
        raise TrainerFailed(f"{where}: {type(error).__name__}: {error}") from error
    rows = _per_token(found, samples.masks, where)
    for place, (row, mask) in enumerate(zip(rows, samples.masks, strict=True)):
        bad = (mask & ~row.isfinite()).nonzero()
        if len(bad):
            token = int(bad[0])
            raise NonFiniteLoss(
                f"{where}: {len(bad)} of the {int(mask.sum())} trained tokens of sample {place} got no finite number, "
                f"the first is token {token}: {row[token].item()}"
            )
    return rows


def _per_token(found: object, masks: Sequence[Tensor], where: str) -> list[Tensor]:
    sizes = [len(mask) for mask in masks]
    if isinstance(found, Tensor):
        if found.shape != (len(sizes),):
            raise TrainerFailed(f"{where}: returned numbers of shape {tuple(found.shape)} for {len(sizes)} samples")
        return [number.expand(size) for number, size in zip(found.detach().cpu().double(), sizes, strict=True)]
    if not isinstance(found, list | tuple) or not all(isinstance(row, Tensor) for row in found):
        kind = f"a {type(found).__name__}" + (" of other things" if isinstance(found, list | tuple) else "")
        raise TrainerFailed(f"{where}: returned {kind}, not a tensor or a list of tensors")
    if len(found) != len(sizes):
        raise TrainerFailed(f"{where}: returned {len(found)} tensors for {len(sizes)} samples")
    for place, (row, size) in enumerate(zip(found, sizes, strict=True)):
        if row.shape != (size,):
            raise TrainerFailed(
                f"{where}: returned numbers of shape {tuple(row.shape)} for the {size} tokens of sample {place}"
            )
    return [row.detach().cpu().double() for row in found]


# ---- loss


class CheckedLoss:
    """A user's loss, which has been tried once on made-up numbers: a wrong shape shows before a model is loaded."""

    def __init__(self, function: LossFn) -> None:
        """Raises PluginError."""
        self._function, self._where = function, f"loss function {_name(function)}"
        self._names: frozenset[str] = frozenset()
        try:
            losses_R, told = self._tried()
        except TrainerFailed as error:
            raise PluginError(f"--custom-loss-function-path: tried on made-up numbers: {error}") from error
        if not losses_R.requires_grad:
            raise PluginError(f"--custom-loss-function-path: {self._where}: its losses do not come from logprobs")
        self._names = frozenset(told)

    def __call__(
        self,
        logprobs_R: Tensor,
        old_logprobs_R: Tensor,
        advantages_R: Tensor,
        mask_R: Tensor,
        lengths: Sequence[int],
        /,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See LossFn; metrics come by their full names.  Raises TrainerFailed or NonFiniteLoss."""
        if not lengths:  # an empty microbatch, which keeps the ranks in step
            return -logprobs_R, _renamed(dict.fromkeys(self._names, logprobs_R))
        # Tokens that no policy sampled may carry any number, and a gradient of 0 times NaN is NaN.
        old_R = torch.where(mask_R, old_logprobs_R, logprobs_R.detach())
        losses_R, told = self._checked(logprobs_R, old_R, advantages_R, mask_R, lengths)
        if told.keys() != self._names:
            raise TrainerFailed(f"{self._where}: reports {_listed(told)}, where it reported {_listed(self._names)}")
        is_bad_R = mask_R & ~losses_R.detach().isfinite()
        if is_bad_R.any():
            raise NonFiniteLoss(
                f"{self._where}: {int(is_bad_R.sum())} of {int(mask_R.sum())} losses are not finite, the first is "
                f"{losses_R[is_bad_R][0].item()}"
            )
        return losses_R, _renamed(told)

    def _tried(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Two answers of three and two tokens, one of them masked."""
        old_R = torch.tensor([-1.0, -2.0, -0.5, -1.5, -3.0])
        logprobs_R = (old_R + torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5])).requires_grad_()
        advantages_R = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0])
        mask_R = torch.tensor([True, True, True, True, False])
        return self._checked(logprobs_R, old_R, advantages_R, mask_R, (3, 2))

    def _checked(
        self, logprobs_R: Tensor, old_R: Tensor, advantages_R: Tensor, mask_R: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        try:
            found = self._function(logprobs_R, old_R, advantages_R, mask_R, lengths)
        except Exception as error:
            raise TrainerFailed(f"{self._where}: {type(error).__name__}: {error}") from error
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
            raise TrainerFailed(f"{self._where}: must return losses and a dict, returned a {type(found).__name__}")
        for name, numbers in {"losses": found[0], **found[1]}.items():
            if not isinstance(numbers, Tensor):
                raise TrainerFailed(f"{self._where}: {name} must be a tensor, is a {type(numbers).__name__}")
            if numbers.shape != logprobs_R.shape:
                raise TrainerFailed(
                    f"{self._where}: {name} have the shape {tuple(numbers.shape)}, the tokens {tuple(logprobs_R.shape)}"
                )
        return found


def _renamed(told: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"train/{name}" if name == CLIP_FRACTION else f"train/custom/{name}": numbers for name, numbers in told.items()
    }


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
