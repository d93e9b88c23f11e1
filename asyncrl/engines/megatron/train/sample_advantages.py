"""Advantages of one rank's samples, by way of the flat steps of ``asyncrl.algorithms.advantages``.

Shape letters: N samples, T their steps (response tokens that the loss mask lets through), K turns with a reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.algorithms.advantages import (
    Total,
    every_step,
    gae,
    group_centred,
    group_normalised,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    step_rewards,
    whitened,
)
from asyncrl.algorithms.kl import kl_estimate
from asyncrl.config.areas import TrainConfig
from asyncrl.config.derived import normalize_advantages
from asyncrl.engines.megatron.model.packing import Example, Floats
from asyncrl.types import Batch

_WITH_STEP_REWARDS = ("reinforce_plus_plus", "ppo")
"""Estimators with a reward per step."""

type TurnOutcomes = Mapping[tuple[int, int], float]
"""Outcomes of turns by the index of the sample in its batch, and the place of the turn in the sample."""


def outcomes_of(batch: Batch, train: TrainConfig) -> Tensor:
    """Compute the outcome of each sample of the batch, in batch order.

    An outcome is the reward, or the reward compared with its group, as the estimator requires.  A user's function
    may have computed outcomes, which replace both: for grpo they are the advantages, for ppo rewards of the last steps.
    """
    samples = [scored for group in batch.groups for scored in group.samples]
    if samples and all(scored.outcome is not None for scored in samples):
        return torch.tensor([scored.outcome for scored in samples], dtype=torch.float64)
    rewards_N = torch.tensor([scored.reward for scored in samples], dtype=torch.float64)
    groups_N = torch.tensor([group.group_id for group in batch.groups for _ in group.samples])
    rollouts_N = torch.tensor([scored.sample.rollout for scored in samples])
    return _compared(rewards_N, groups_N, rollouts_N, train)


def turn_outcomes_of(batch: Batch, train: TrainConfig) -> TurnOutcomes:
    """Compute the outcome of each turn that has a reward, by the index of its sample and the place of the turn.

    An outcome is ``--turn-reward-coef`` times the turn's reward, or the reward compared with those of all turns of its
    group, as the estimator requires.  A turn that several samples of a rollout hold counts once in that comparison.
    """
    if train.turn_reward_coef == 0:
        return {}
    samples = ((group.group_id, scored.sample) for group in batch.groups for scored in group.samples)
    turns = [
        ((index, place), group_id, (group_id, sample.rollout, turn.call), turn.reward)
        for index, (group_id, sample) in enumerate(samples)
        for place, turn in enumerate(sample.turns)
        if turn.reward is not None
    ]
    if not turns:
        return {}
    numbers: dict[tuple[int, int, int], int] = {}
    rewards_K = torch.tensor([reward for *_, reward in turns], dtype=torch.float64)
    groups_K = torch.tensor([group_id for _, group_id, _, _ in turns])
    calls_K = torch.tensor([numbers.setdefault(call, len(numbers)) for _, _, call, _ in turns])
    outcomes_K = train.turn_reward_coef * _compared(rewards_K, groups_K, calls_K, train)
    return dict(zip([place for place, *_ in turns], outcomes_K.tolist(), strict=True))


def _compared(rewards_N: Tensor, groups_N: Tensor, rollouts_N: Tensor, train: TrainConfig) -> Tensor:
    """Compare rewards within groups as the estimator requires; some estimators take them as they are."""
    if train.advantage_estimator in _WITH_STEP_REWARDS:
        return rewards_N
    if train.advantage_estimator == "reinforce_plus_plus_baseline" or train.disable_grpo_std_normalization:
        return group_centred(rewards_N, groups_N, rollouts_N)
    return group_normalised(rewards_N, groups_N, rollouts_N)


def needs_proximal(train: TrainConfig) -> bool:
    """Return whether advantages need the trainer's log-probs from before the step, which cost a forward pass."""
    return train.kl_coef > 0 or train.custom_advantage_function_path is not None


def with_advantages(
    examples: Sequence[Example],
    outcomes_N: Tensor,
    train: TrainConfig,
    total: Total,
    custom: Sequence[Tensor] | None = None,
    turn_outcomes: TurnOutcomes = MappingProxyType({}),
) -> tuple[list[Example], dict[str, float]]:
    """Return the examples with their advantages (for ppo also returns), and the numbers to report by metric name.

    ``outcomes_N`` has the outcomes of the whole batch, by index.  ``examples`` are the samples of one rank.  They have
    proximal and reference log-probs if ``--kl-coef`` is above 0, and values if there is a critic.  ``custom`` has the
    advantages of all the batch's answers by token, and replaces the estimator.  ``turn_outcomes`` are those of
    ``turn_outcomes_of``: estimators with rewards of steps get them at the last step of each turn, others add them to
    the advantage of each of its steps.  Every rank must call it: ``total`` sums over the ranks.
    """
    mine_N = outcomes_N[torch.tensor([example.index for example in examples], dtype=torch.long)]
    lengths = [sum(example.loss_mask) for example in examples]
    kl_T = _kl(examples, train)
    turns_T = _at_turns(examples, turn_outcomes, at_last_step=train.advantage_estimator in _WITH_STEP_REWARDS)
    told: dict[str, float] = {}
    if custom is not None:
        rows = [custom[example.index][_counts(example)] for example in examples]
        advantages_T = torch.cat([torch.zeros(0, dtype=torch.float64), *rows])
    elif train.advantage_estimator == "reinforce_plus_plus":
        gamma = train.gamma
        advantages_T = reinforce_plus_plus(mine_N, kl_T, lengths, kl_coef=train.kl_coef, gamma=gamma, turns_T=turns_T)
    elif train.advantage_estimator == "reinforce_plus_plus_baseline":
        advantages_T = _plus(reinforce_plus_plus_baseline(mine_N, kl_T, lengths, kl_coef=train.kl_coef), turns_T)
    elif train.advantage_estimator == "ppo":
        rewards_T = step_rewards(mine_N, kl_T, lengths, kl_coef=train.kl_coef, turns_T=turns_T)
        values_T = _at_steps(examples, [example.values for example in examples])
        advantages_T, returns_T = gae(rewards_T, values_T, lengths, gamma=train.gamma, lambd=train.lambd)
        returns = _at_tokens(examples, returns_T, lengths)
        examples = [replace(example, returns=row) for example, row in zip(examples, returns, strict=True)]
    else:
        advantages_T = _plus(every_step(mine_N, lengths), turns_T)
    if normalize_advantages(train):
        advantages_T = whitened(advantages_T, total)
    advantages = _at_tokens(examples, advantages_T, lengths)
    if train.kl_coef > 0:
        kl, count = total(torch.tensor([kl_T.sum().item(), float(len(kl_T))], dtype=torch.float64)).tolist()
        told["train/reward_kl"] = kl / max(1.0, count)
    return [replace(example, advantages=row) for example, row in zip(examples, advantages, strict=True)], told


def _at_turns(examples: Sequence[Example], outcomes: TurnOutcomes, *, at_last_step: bool) -> Tensor | None:
    """Place the outcomes of turns at their steps, or at the last step of each turn; None without outcomes.

    The outcome of a turn without steps is lost.  The result is None on all ranks or on none.
    """
    if not outcomes:
        return None
    rows = [np.zeros(0)]
    for example in examples:
        row, mask = np.zeros(example.num_response), _counts(example)
        for place, (start, stop) in enumerate(example.turns):
            steps = start + np.flatnonzero(mask[start:stop])
            row[steps[-1:] if at_last_step else steps] += outcomes.get((example.index, place), 0.0)
        rows.append(row[mask])
    return torch.from_numpy(np.concatenate(rows))


def _plus(advantages_T: Tensor, turns_T: Tensor | None) -> Tensor:
    return advantages_T if turns_T is None else advantages_T + turns_T


def _kl(examples: Sequence[Example], train: TrainConfig) -> Tensor:
    """Estimate the KL divergence of the proximal policy from the reference at each step; 0 without ``--kl-coef``."""
    if train.kl_coef == 0:
        return torch.zeros(sum(sum(example.loss_mask) for example in examples), dtype=torch.float64)
    proximal_T = _at_steps(examples, [example.proximal_logprobs for example in examples])
    return kl_estimate(
        train.kl_loss_type, proximal_T, _at_steps(examples, [example.ref_logprobs for example in examples])
    )


def _at_steps(examples: Sequence[Example], rows: Sequence[Floats | None]) -> Tensor:
    there = [row for row in rows if row is not None]
    assert len(there) == len(examples), "log-probs and values must be computed before advantages that need them"
    kept = [row[_counts(example)] for example, row in zip(examples, there, strict=True)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *kept])).double()


def _at_tokens(examples: Sequence[Example], values_T: Tensor, lengths: Sequence[int]) -> list[Floats]:
    """Return one row per example, 0 at tokens outside the loss mask."""
    rows = []
    parts = np.split(values_T.numpy(), np.cumsum(lengths)[:-1]) if examples else []
    for example, steps in zip(examples, parts, strict=True):
        row = np.zeros(example.num_response, np.float32)
        row[_counts(example)] = steps
        rows.append(row)
    return rows


def _counts(example: Example) -> NDArray[np.bool_]:
    """True at tokens that the loss mask lets through."""
    return np.array(example.loss_mask, np.bool_)
