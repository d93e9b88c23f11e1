"""Kept ids and score centering in the real trainer, against transformers and autograd over all logits."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from asyncrl.types import Batch, Sample, ScoredSample
from tests.engines.megatron.tiny import VOCAB, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.train.episode_batches import sets_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:::torch"),  # torch warns about calls by Megatron
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


def batch_with_sets(*, kept: bool, top: int) -> Batch:
    """A random batch; half of the tokens were drawn among a few ids if ``kept``, and all have ``top`` likeliest ids."""
    rng = random.Random(1)

    def changed(scored: ScoredSample) -> ScoredSample:
        limited, likeliest = [], []
        for token in scored.sample.token_ids:
            others = [other for other in rng.sample(range(VOCAB), VOCAB) if other != token]
            limited.append([token, *others[:9]] if kept and rng.random() < 0.5 else [])
            likeliest.append((limited[-1] or [token, *others])[:top])
        sample = replace(
            scored.sample,
            kept=sets_of(limited, None) if kept else None,
            top=sets_of(likeliest, rng) if top else None,
        )
        return replace(scored, sample=sample)

    batch = random_batch()
    groups = (replace(group, samples=tuple(map(changed, group.samples))) for group in batch.groups)
    return replace(batch, groups=tuple(groups))


def answers(batch: Batch) -> list[tuple[tuple[int, ...], ScoredSample]]:
    return [(group.prompt.token_ids, scored) for group in batch.groups for scored in group.samples]


def all_logprobs(checkpoint: Path, batch: Batch, temperature: float) -> tuple[torch.nn.Module, list[Tensor]]:
    """The model of transformers, and log-probs of all ids at each response token, over the kept ids."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = []
    for prompt, scored in answers(batch):
        ids = torch.tensor(prompt + scored.sample.token_ids)
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        rows.append(logits.masked_fill(~kept_mask(scored.sample), -torch.inf).log_softmax(-1))
    return model, rows


def kept_mask(sample: Sample) -> Tensor:
    mask = torch.ones(len(sample.token_ids), VOCAB, dtype=torch.bool)
    if sample.kept is not None:
        mask[torch.from_numpy(sample.kept.counts_T) > 0] = False
        mask[sample.kept.tokens_I, sample.kept.ids_I] = True
    return mask


def drawn(rows: Sequence[Tensor], batch: Batch) -> list[Tensor]:
    return [
        row.gather(1, torch.tensor(scored.sample.token_ids)[:, None])[:, 0]
        for row, (_, scored) in zip(rows, answers(batch), strict=True)
    ]


def norm_of(loss: Tensor, model: torch.nn.Module) -> float:
    loss.backward()  # type: ignore[no-untyped-call]  # torch is untyped
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm())


def advantages(batch: Batch) -> list[float]:
    found = []
    for group in batch.groups:
        rewards = torch.tensor([scored.reward for scored in group.samples])
        found.append(((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist())
    return [*chain(*found)]


def mean_loss(losses: Sequence[Tensor], batch: Batch) -> Tensor:
    """The mean over each sample's trained tokens, then over samples."""
    masks = [torch.tensor(scored.loss_mask, dtype=torch.float32) for _, scored in answers(batch)]
    means = [(loss * mask).sum() / mask.sum().clamp(min=1) for loss, mask in zip(losses, masks, strict=True)]
    return torch.stack(means).mean()


def test_logprobs_entropy_and_gradient_are_over_the_kept_ids(checkpoint: Path) -> None:
    batch = batch_with_sets(kept=True, top=0)
    settings = trainer_settings(checkpoint, use_rollout_logprobs=True, entropy_coef=0.1)
    model, rows = all_logprobs(checkpoint, batch, settings.temperature)
    entropies = [-torch.where(row.isfinite(), row.exp() * row.clamp(min=-1e9), 0.0).sum(-1) for row in rows]
    losses = []
    for row, entropy, (_, scored), advantage in zip(
        drawn(rows, batch), entropies, answers(batch), advantages(batch), strict=True
    ):
        ratio = (row - torch.tensor(scored.sample.logprobs)).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.1 * entropy)
    loss = mean_loss(losses, batch)
    norm = norm_of(loss, model)

    with one_rank(settings) as rank:
        report = rank.train(batch)

    pairs = zip(report.logprobs, drawn(rows, batch), strict=True)
    assert max((torch.tensor(got) - row).abs().max().item() for got, row in pairs) < 1e-4
    assert report.loss == pytest.approx(loss.item(), rel=1e-4)
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("tis", [{}, {"use_tis": True, "tis_clip": 1.5}, {"use_tis": True, "tis_mode": "mask"}])
def test_score_centering_is_that_over_the_whole_vocabulary(checkpoint: Path, kept: bool, tis: dict[str, Any]) -> None:
    batch = batch_with_sets(kept=kept, top=6)
    settings = trainer_settings(checkpoint, use_score_centering=True, **tis)
    model, rows = all_logprobs(checkpoint, batch, settings.temperature)
    losses = [
        centered(
            row, one, scored.sample, advantage, settings.train.tis_mode if tis else "none", settings.train.tis_clip
        )
        for row, one, (_, scored), advantage in zip(
            rows, drawn(rows, batch), answers(batch), advantages(batch), strict=True
        )
    ]
    loss = mean_loss(losses, batch)
    norm = norm_of(loss, model)

    with one_rank(settings) as rank:
        report = rank.train(batch)

    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert report.metrics["train/score_uncentered"] == 0
    assert report.metrics["train/score_subtracted"] > 0


def centered(row: Tensor, one: Tensor, sample: Sample, advantage: float, mode: str, high: float) -> Tensor:
    """The loss with the sampler's policy written out over the whole vocabulary; its unknown part is rho p."""
    assert sample.top is not None
    assert sample.top.logprobs_I is not None
    p = row.detach().exp()
    q = torch.zeros_like(p)
    q[sample.top.tokens_I, sample.top.ids_I] = torch.from_numpy(sample.top.logprobs_I).exp()
    known = torch.zeros_like(p, dtype=torch.bool)
    known[sample.top.tokens_I, sample.top.ids_I] = True
    tails = [(1 - torch.where(known, each, 0.0).sum(-1, keepdim=True)).clamp(min=1e-6) for each in (q, p)]
    q = torch.where(known, q, p * tails[0] / tails[1])
    mean = (q * weight(p / q.clamp(min=1e-30), mode, high) * row.clamp(min=-1e9)).sum(-1)
    own = weight((one.detach() - torch.from_numpy(np.array(sample.logprobs))).exp(), mode, high)
    return -advantage * (own * one - mean)


def weight(ratio: Tensor, mode: str, high: float) -> Tensor:
    if mode == "none":
        return torch.ones_like(ratio)
    return ratio.clamp(max=high) if mode == "truncate" else torch.where(ratio > high, 0.0, ratio)
