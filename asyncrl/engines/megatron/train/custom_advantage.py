"""A user's functions in the trainer: their loading, the call of the advantage function, and checks of its result.

Shape letters: N samples of a training step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algorithms.custom_functions import AdvantageFn, Custom, StepSamples
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.config.areas import TrainConfig
from asyncrl.config.derived import uses_reference
from asyncrl.engines.megatron.model.packing import Example, Floats, prompt_of
from asyncrl.engines.megatron.setup.ranks import on_first_rank
from asyncrl.engines.megatron.setup.settings import Resolver
from asyncrl.engines.megatron.train.custom_loss import CheckedLoss
from asyncrl.engines.megatron.train.custom_tis import CheckedTis
from asyncrl.engines.megatron.train.first_failure import FirstFailure
from asyncrl.errors import NonFiniteLoss, TrainerFailed, name_of
from asyncrl.types import Batch, Sample, ScoredGroup


def custom_of(resolve: Resolver | None) -> Custom:
    """Load the user's functions, and try the loss and the correction once.  Raises PluginError."""
    custom = Custom() if resolve is None else resolve()
    failure = FirstFailure()  # shared, so that a pass costs one check whatever functions there are
    return Custom(
        advantage=custom.advantage,
        loss=None if custom.loss is None else CheckedLoss(custom.loss, failure),
        tis=None if custom.tis is None else CheckedTis(custom.tis, failure),
    )


def custom_advantages(
    function: AdvantageFn | None,
    batch: Batch,
    outcomes_N: Tensor,
    mine: Sequence[Example],
    train: TrainConfig,
) -> list[Tensor] | None:
    """Compute an advantage for each token of each answer, by index in the batch; None without a function.

    Every rank must call it, with the samples of that rank as ``mine``.  The function runs on rank 0 alone, which sees
    all samples: it gets whole groups, and all ranks get the same result even if the function draws random numbers.
    Raises TrainerFailed or NonFiniteLoss on all ranks alike.
    """
    if function is None:
        return None
    # Routes and sets of ids are megabytes for each answer, and the function sees neither.
    light = [replace(example, routes=None, kept=None, top=None) for example in mine]
    examples = list(chain(*on_first_rank(light)))
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
    """Assemble all samples of ``batch``; ``examples`` has the samples with tokens, in any order."""
    by_index = {example.index: example for example in examples}
    samples = [(group, scored) for group in batch.groups for scored in group.samples]
    there = [by_index.get(place) for place in range(len(samples))]
    proximal = _rows([None if each is None else each.proximal_logprobs for each in there])
    behaviour = [torch.tensor(scored.sample.logprobs, dtype=torch.float64) for _, scored in samples]
    ref = kl = None
    if uses_reference(train):
        ref = _rows([None if each is None else each.ref_logprobs for each in there])
        kl = tuple(kl_estimate(train.kl_loss_type, p, r) for p, r in zip(proximal, ref, strict=True))
    return StepSamples(
        step=batch.step,
        rewards_N=torch.tensor([scored.reward for _, scored in samples], dtype=torch.float64),
        groups_N=torch.tensor([group.group_id for group, _ in samples]),
        rollouts_N=torch.tensor([scored.sample.rollout for _, scored in samples]),
        outcomes_N=outcomes_N,
        token_ids=tuple(torch.tensor(_token_ids(group, scored.sample)) for group, scored in samples),
        masks=tuple(torch.tensor(scored.loss_mask, dtype=torch.bool) for _, scored in samples),
        turns=tuple(_turn_places(scored.sample) for _, scored in samples),
        turn_rewards=tuple(_turn_rewards(scored.sample) for _, scored in samples),
        behaviour_logprobs=tuple(
            torch.where(row.isnan(), known, row) for row, known in zip(behaviour, proximal, strict=True)
        ),
        proximal_logprobs=proximal,
        ref_logprobs=ref,
        kl=kl,
    )


def _token_ids(group: ScoredGroup, sample: Sample) -> tuple[int, ...]:
    return prompt_of(group, sample) + sample.token_ids


def _turn_places(sample: Sample) -> Tensor:
    """Return the place of each token's turn, -1 at observations; an answer without turns is one turn."""
    places = torch.full((len(sample.token_ids),), -1 if sample.turns else 0)
    for place, turn in enumerate(sample.turns):
        places[turn.start : turn.stop] = place
    return places


def _turn_rewards(sample: Sample) -> Tensor:
    rewards = [turn.reward for turn in sample.turns] or [None]
    return torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)


def _rows(rows: Sequence[Floats | None]) -> tuple[Tensor, ...]:
    """Convert each row to a float64 tensor, which is empty for a sample without tokens."""
    return tuple(torch.from_numpy(np.zeros(0) if row is None else row).double() for row in rows)


def _called(function: AdvantageFn, samples: StepSamples) -> list[Tensor]:
    """Call the function and check its result.

    Raises TrainerFailed if the call fails or the shapes are wrong, and NonFiniteLoss if a trained token's advantage is
    not finite.
    """
    where = f"step {samples.step}: advantage function {name_of(function)}"
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
                f"{where}: advantages of {len(bad)} of the {int(mask.sum())} trained tokens of sample {place} are not "
                f"finite, the first at token {token}: {row[token].item()}"
            )
    return rows


def _per_token(found: object, masks: Sequence[Tensor], where: str) -> list[Tensor]:
    """Return a tensor for each sample, none of which is a view of a larger one: pickle would write all of that."""
    sizes = [len(mask) for mask in masks]
    if isinstance(found, Tensor):
        if found.shape != (len(sizes),):
            raise TrainerFailed(f"{where}: returned a tensor of shape {tuple(found.shape)} for {len(sizes)} samples")
        numbers = found.detach().cpu().double()
        return [number.clone().expand(size) for number, size in zip(numbers, sizes, strict=True)]
    if not isinstance(found, list | tuple) or not all(isinstance(row, Tensor) for row in found):
        kind = f"a {type(found).__name__}" + (" with other items" if isinstance(found, list | tuple) else "")
        raise TrainerFailed(f"{where}: returned {kind}, not a tensor or a list of tensors")
    if len(found) != len(sizes):
        raise TrainerFailed(f"{where}: returned {len(found)} tensors for {len(sizes)} samples")
    for place, (row, size) in enumerate(zip(found, sizes, strict=True)):
        if row.shape != (size,):
            raise TrainerFailed(
                f"{where}: returned a tensor of shape {tuple(row.shape)} for the {size} tokens of sample {place}"
            )
    return [row.detach().to("cpu", torch.float64, copy=True) for row in found]
