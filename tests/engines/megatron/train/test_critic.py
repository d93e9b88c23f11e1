"""PPO's critic in the real trainer, against transformers' hidden states and loops over tokens."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers

from asyncrl.errors import ConfigError, NonFiniteLoss
from asyncrl.types import Batch
from tests.engines.megatron.tiny import one_rank, poisoned, random_batch, trainer_settings, write_checkpoint

GAMMA, LAMBD = 0.9, 0.8
PPO: dict[str, Any] = {"advantage_estimator": "ppo", "gamma": GAMMA, "lambd": LAMBD}
GRADIENT_DESCENT: dict[str, Any] = {"lr": 1e4, "adam_eps": 1e4, "clip_grad": 0.0, "weight_decay": 0.0}
"""Adam with an epsilon far above any gradient: the weights move by minus the gradient."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"), tied=True)


class PlainCritic(torch.nn.Module):
    """A transformers model with a linear layer that gives one value per position."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).model
        self.head = torch.nn.Linear(self.base.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def values(self, batch: Batch) -> list[torch.Tensor]:
        """The values of every answer at its unmasked tokens."""
        rows = []
        for group in batch.groups:
            for scored in group.samples:
                ids = torch.tensor(group.prompt.token_ids + scored.sample.token_ids)
                hidden = self.base(ids[None], use_cache=False).last_hidden_state[0]
                values = self.head(hidden[len(group.prompt.token_ids) - 1 : -1])[:, 0]
                rows.append(values[torch.tensor(scored.loss_mask).bool()])
        return rows

    def loss(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """The mean over answers of their mean squared error, and the mean over all tokens."""
        rows, errors = self.values(batch), []
        rewards = [scored.reward for group in batch.groups for scored in group.samples]
        for row, reward in zip(rows, rewards, strict=True):
            _, returns = plain_gae(row.tolist(), reward)
            errors.append((row - torch.tensor(returns)) ** 2)
        mean = torch.stack([error.mean() if len(error) else error.sum() for error in errors]).mean()
        return mean, torch.cat(errors).mean().item()


def plain_gae(values: list[float], reward: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of one answer."""
    num = len(values)
    deltas = [(reward if t == num - 1 else GAMMA * values[t + 1]) - values[t] for t in range(num)]
    advantages = [sum((GAMMA * LAMBD) ** (s - t) * deltas[s] for s in range(t, num)) for t in range(num)]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def test_values_returns_and_gradients_are_those_of_the_paper(checkpoint: Path) -> None:
    batch = random_batch(groups=3)
    critic = PlainCritic(checkpoint)
    with one_rank(trainer_settings(checkpoint, **PPO, **GRADIENT_DESCENT)) as rank:
        reports = [rank.train(batch) for _ in range(2)]
    for report in reports:
        critic.zero_grad()
        loss, per_token = critic.loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch is untyped
        assert report.metrics["train/value_loss"] == pytest.approx(per_token, rel=1e-4)
        gradients = [p.grad for p in critic.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        assert report.metrics["train/critic_grad_norm"] == pytest.approx(norm, rel=1e-4)
        with torch.no_grad():
            for parameter in critic.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
    assert reports[0].metrics["train/value_clip_fraction"] == 0.0


def test_the_policy_is_trained_with_advantages_over_the_values(checkpoint: Path) -> None:
    batch = random_batch(groups=3)
    with one_rank(trainer_settings(checkpoint, **PPO)) as rank:
        report = rank.train(batch)
    losses = []
    for group in batch.groups:
        for scored in group.samples:
            advantages, _ = plain_gae([0.0] * sum(scored.loss_mask), scored.reward)
            losses.append(-fmean(advantages) if advantages else 0.0)  # of ratio 1
    assert report.loss == pytest.approx(fmean(losses), rel=1e-4)


def test_the_critic_learns_while_the_policy_waits_for_num_critic_only_steps(checkpoint: Path) -> None:
    batch = random_batch()
    settings = trainer_settings(checkpoint, **PPO, lr=1e-3, critic_lr=3e-3, num_critic_only_steps=6)
    with one_rank(settings) as rank:
        reports = [rank.train(random_batch(step=step)) for step in range(7)]
        after = rank.train(batch).logprobs
    losses = [report.metrics["train/value_loss"] for report in reports]
    assert losses[6] < 0.5 * losses[0]
    assert all(report.logprobs == reports[0].logprobs for report in reports)
    assert after != reports[0].logprobs


def test_value_clip_bounds_how_far_a_value_moves_in_one_step(checkpoint: Path) -> None:
    batch = random_batch(groups=2)
    twice = replace(batch, groups=(batch.groups[0], batch.groups[0]))
    settings = trainer_settings(checkpoint, **PPO, num_steps_per_rollout=2, critic_lr=1e-2, value_clip=1e-3)
    with one_rank(settings) as rank:
        report = rank.train(twice)
    assert report.metrics["train/value_clip_fraction"] == pytest.approx(0.5, abs=0.1)  # the second update's


def test_a_critic_may_be_smaller_but_must_share_the_vocabulary_size(tmp_path: Path, checkpoint: Path) -> None:
    small = write_checkpoint(tmp_path / "small", num_hidden_layers=1)
    with one_rank(trainer_settings(checkpoint, **PPO, critic_load=small)) as rank:
        assert rank.train(random_batch()).metrics["train/critic_grad_norm"] > 0
    other = write_checkpoint(tmp_path / "other", vocab_size=50)
    settings = trainer_settings(checkpoint, **PPO, critic_load=other)
    with pytest.raises(ConfigError, match="has a vocabulary size of 50, the policy 96"), one_rank(settings):
        pass


@pytest.mark.parametrize("updates", [1, 2])
def test_a_loss_that_is_not_finite_changes_neither_policy_nor_critic(checkpoint: Path, updates: int) -> None:
    batch = random_batch()
    settings = trainer_settings(checkpoint, **PPO, use_rollout_logprobs=True, num_steps_per_rollout=updates)
    ends = []
    for stumbles in (False, True):
        with one_rank(settings) as rank:
            rank.train(batch)
            if stumbles:
                with pytest.raises(NonFiniteLoss, match="policy: loss nan"):
                    rank.train(poisoned(batch, 3))
            ends.append([rank.train(batch) for _ in range(2)])
    for without, after in zip(*ends, strict=True):
        assert after.metrics == without.metrics
        assert after.logprobs == without.logprobs
