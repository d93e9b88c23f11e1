"""Every estimator, loss and correction in the real trainer, against transformers and loops over tokens."""

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
import transformers

from asyncrl.config.areas import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.types import Batch
from tests.declared_metrics import is_declared
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings, write_checkpoint
from tests.save_targets import target as target_of

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A reference model: the policy with slightly changed weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("reference")
    model.save_pretrained(folder)
    return folder


def answers(model: torch.nn.Module, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """transformers' log-probs of every answer's tokens, and the entropies of their distributions."""
    logprobs, entropies = [], []
    for group in batch.groups:
        for scored in group.samples:
            ids = torch.tensor(group.prompt.token_ids + scored.sample.token_ids)
            start = len(group.prompt.token_ids)
            rows = (model(ids[None], use_cache=False).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
            logprobs.append(rows.gather(1, ids[start:, None])[:, 0])
            entropies.append(-(rows.exp() * rows).sum(-1))
    return logprobs, entropies


def plain_kl(kind: str, d: torch.Tensor) -> torch.Tensor:
    return {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def plain_advantages(train: TrainConfig, batch: Batch, kl: list[list[float]]) -> list[list[float]]:
    """The advantage of each token of every answer; ``kl`` has the same form."""
    rows, place = [], 0
    for group in batch.groups:
        rewards = [scored.reward for scored in group.samples]
        for scored in group.samples:
            steps = [t for t, counts in enumerate(scored.loss_mask) if counts]
            row = [0.0] * len(scored.loss_mask)
            for order, t in enumerate(steps):
                if train.advantage_estimator == "reinforce_plus_plus":
                    to_come = steps[order:]
                    row[t] = sum(-train.kl_coef * kl[place][s] * train.gamma**k for k, s in enumerate(to_come))
                    row[t] += scored.reward * train.gamma ** (len(to_come) - 1)
                elif train.advantage_estimator == "reinforce_plus_plus_baseline":
                    row[t] = scored.reward - fmean(rewards) - train.kl_coef * kl[place][t]
                else:
                    row[t] = (scored.reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
            rows.append(row)
            place += 1
    if train.advantage_estimator.startswith("reinforce"):
        masks = [scored.loss_mask for group in batch.groups for scored in group.samples]
        counted = [
            a for row, mask in zip(rows, masks, strict=True) for a, counts in zip(row, mask, strict=True) if counts
        ]
        rows = [[(a - fmean(counted)) / stdev(counted) for a in row] for row in rows]
    return rows


def plain_policy_loss(
    train: TrainConfig, a: float, t: int, steps: list[int], p: torch.Tensor, old: torch.Tensor
) -> torch.Tensor:
    """The loss of token ``t`` before all corrections."""
    ratio = torch.exp(p[t] - old[t])
    if train.advantage_estimator == "gspo":
        ratio = torch.exp(torch.stack([p[s] - old[s] for s in steps]).mean())
    held = ratio.clamp(1 - train.eps_clip, 1 + train.eps_clip)
    if train.advantage_estimator == "cispo":
        return -held.detach() * a * p[t]
    loss = -torch.minimum(ratio * a, held * a)
    if train.eps_clip_c is not None and a < 0:
        loss = torch.minimum(loss, torch.tensor(-train.eps_clip_c * a))
    return loss


def plain_correction(
    train: TrainConfig, a: float, t: int, steps: list[int], p: list[float], behaviour: list[float]
) -> dict[str, float]:
    """The metrics of token ``t``: the factor of its loss, and whether the token is masked."""
    told = {}
    if train.use_tis:
        weight = math.exp(p[t] - behaviour[t])
        if train.tis_level == "geometric":
            weight = math.exp(fmean(p[s] - behaviour[s] for s in steps))
        is_outside = not train.tis_clip_low <= weight <= train.tis_clip
        truncated = min(max(weight, train.tis_clip_low), train.tis_clip)
        told["train/tis_weight"] = truncated if train.tis_mode == "truncate" else weight * (not is_outside)
        told["train/tis_outside"] = float(is_outside)
    if train.use_opsm:
        told["train/opsm_masked"] = float(a < 0 and fmean(behaviour[s] - p[s] for s in steps) > train.opsm_delta)
    return told


def plain_loss(
    train: TrainConfig, batch: Batch, model: torch.nn.Module, reference: torch.nn.Module
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a step's only update, and the expected means over tokens."""
    logprobs, entropies = answers(model, batch)
    with torch.no_grad():
        references, _ = answers(reference, batch)
    kl = [plain_kl(train.kl_loss_type, p.detach() - r).tolist() for p, r in zip(logprobs, references, strict=True)]
    advantages = plain_advantages(train, batch, kl)
    samples = [scored for group in batch.groups for scored in group.samples]
    losses, told = list[list[torch.Tensor]](), list[dict[str, float]]()
    for scored, p, h, r, advantage, charged in zip(
        samples, logprobs, entropies, references, advantages, kl, strict=True
    ):
        steps = [t for t, counts in enumerate(scored.loss_mask) if counts]
        behaviour = torch.tensor(scored.sample.logprobs)
        old = p.detach() if train.use_tis else behaviour
        losses.append([])
        for t in steps:
            loss = plain_policy_loss(train, advantage[t], t, steps, p, old)
            told.append(plain_correction(train, advantage[t], t, steps, p.tolist(), behaviour.tolist()))
            loss = loss * told[-1].get("train/tis_weight", 1.0) * (1.0 - told[-1].get("train/opsm_masked", 0.0))
            if train.use_kl_loss:
                weight = torch.exp(p[t] - old[t]) if train.use_unbiased_kl else 1.0
                estimate = weight * plain_kl(train.kl_loss_type, p[t] - r[t])
                loss = loss + train.kl_loss_coef * estimate
                told[-1]["train/kl"] = estimate.item()
            if train.kl_coef:
                told[-1]["train/reward_kl"] = charged[t]
            losses[-1].append(loss - train.entropy_coef * h[t])
    means = {name: fmean(of_token[name] for of_token in told) for name in told[0]}
    if train.calculate_per_token_loss:
        return torch.stack([loss for row in losses for loss in row]).mean(), means
    return torch.stack([torch.stack(row).mean() if row else torch.zeros(()) for row in losses]).mean(), means


@pytest.mark.parametrize(
    "changes",
    [
        {"advantage_estimator": "gspo", "eps_clip": 0.05},
        {"advantage_estimator": "cispo", "eps_clip": 0.3},
        {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.3, "gamma": 0.9, "kl_loss_type": "k1"},
        {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.3, "kl_loss_type": "k2"},
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3", "entropy_coef": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3", "use_unbiased_kl": True, "eps_clip_c": 1.5},
        {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.5, "use_opsm": True, "opsm_delta": 0.2},
        {"use_tis": True, "tis_mode": "mask", "tis_level": "geometric", "calculate_per_token_loss": True},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_loss_and_gradient_are_those_of_the_papers(checkpoint: Path, reference: Path, changes: dict[str, Any]) -> None:
    batch = random_batch(groups=3)
    against_rollout = not changes.get("use_tis", False)
    settings = trainer_settings(checkpoint, use_rollout_logprobs=against_rollout, ref_load=reference, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    moved = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    loss, told = plain_loss(settings.train, batch, model, moved)
    loss.backward()  # type: ignore[no-untyped-call]  # torch is untyped
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    with one_rank(settings) as rank:
        report = rank.train(batch)
    assert report.loss == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert report.metrics == pytest.approx(told, rel=1e-4)
    assert all(is_declared(name) for name in report.metrics)


def test_the_reference_stays_where_the_policy_was(checkpoint: Path) -> None:
    batch = random_batch()
    settings = trainer_settings(checkpoint, lr=1e-3, use_kl_loss=True, kl_loss_type="k3")
    with one_rank(settings) as rank:
        distances = [rank.train(batch).metrics["train/kl"] for _ in range(3)]
    assert distances[0] == pytest.approx(0.0, abs=1e-9)
    assert 0 < distances[1] < distances[2]


def test_a_kl_loss_keeps_the_policy_near_the_reference(checkpoint: Path, reference: Path) -> None:
    batch = random_batch()
    ends = []
    for coef in (0.0, 30.0):
        kl: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": coef, "kl_loss_type": "k3", "ref_load": reference}
        with one_rank(trainer_settings(checkpoint, lr=1e-3, **kl)) as rank:
            first, *_, last = [rank.train(batch).metrics["train/kl"] for _ in range(4)]
        ends.append(last - first)
    assert ends[1] < 0 < ends[0]


def test_advantages_take_log_probs_from_before_the_step(checkpoint: Path, reference: Path) -> None:
    batch = random_batch(groups=4)
    kl: dict[str, Any] = {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.1,
        "ref_load": reference,
        "lr": 1e-2,
    }
    reports = []
    for updates in (1, 2):
        with one_rank(trainer_settings(checkpoint, num_steps_per_rollout=updates, **kl)) as rank:
            reports.append(rank.train(batch))
    assert reports[1].metrics["train/reward_kl"] == pytest.approx(reports[0].metrics["train/reward_kl"], rel=1e-5)


def test_a_reference_of_another_shape_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=3)
    settings = trainer_settings(checkpoint, use_kl_loss=True, ref_load=other)
    with pytest.raises(ConfigError, match="is of another model than hf-checkpoint"), one_rank(settings):
        pass


@pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron
def test_a_checkpoint_may_be_the_reference(tmp_path: Path, checkpoint: Path) -> None:
    batch = random_batch()
    with one_rank(trainer_settings(checkpoint)) as rank:
        rank.train(batch)
        rank.save(tmp_path / "hf")
        rank.begin_checkpoint(target_of(tmp_path, 1), {"step": 1}, with_optimizer=False)
        rank.finish_checkpoint()
    found = []
    for folder in ("hf", "iter_0000001"):
        kl: dict[str, Any] = {
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_loss_type": "k3",
            "ref_load": tmp_path / folder,
        }
        with one_rank(trainer_settings(checkpoint, **kl)) as rank:
            found.append([rank.train(batch) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert one.metrics["train/kl"] > 0
        assert one.metrics == other.metrics
        assert one.logprobs == other.logprobs
