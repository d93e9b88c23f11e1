"""Episodes in the real trainer: observations, unknown log-probs, several samples of a rollout, uneven groups."""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers

from asyncrl.algorithms.custom_functions import Custom, StepSamples
from asyncrl.engines.megatron.train.optimizer_updates import updates_of
from asyncrl.types import Batch, Sample, ScoredSample, TrainReport
from tests.declared_metrics import is_declared
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings, write_checkpoint
from tests.engines.megatron.train.episode_batches import episode_batch, group_of, known, sample_of, unknown

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


def samples_of(batch: Batch) -> list[ScoredSample]:
    return [scored for group in batch.groups for scored in group.samples]


def plain_logprobs(checkpoint: Path, batch: Batch, temperature: float) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The log-probs of every response token by transformers, one whole sequence at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = []
    for group in batch.groups:
        for scored in group.samples:
            prompt = group.prompt.token_ids if scored.sample.prompt_ids is None else scored.sample.prompt_ids
            ids = torch.tensor(prompt + scored.sample.token_ids)
            logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
            rows.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0])
    return model, rows


def expected_loss(batch: Batch, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """GRPO with PPO's clip at 0.2, over the tokens of each rollout together.  Shares no code with the package."""
    means = []
    flat = iter(rows)
    for group in batch.groups:
        rollouts = sorted({scored.sample.rollout for scored in group.samples})
        members = {r: [s for s in group.samples if s.sample.rollout == r] for r in rollouts}
        mean = fmean(fmean(s.reward for s in members[r]) for r in rollouts)
        spread = sum(fmean((s.reward - mean) ** 2 for s in members[r]) for r in rollouts) / (len(rollouts) - 1)
        losses: dict[int, list[torch.Tensor]] = {r: [] for r in rollouts}
        for scored in group.samples:
            advantage = (scored.reward - mean) / (math.sqrt(spread) + 1e-6)
            for new, old, counts in zip(next(flat), scored.sample.logprobs, scored.loss_mask, strict=True):
                if counts:
                    ratio = (new - old).exp()
                    losses[scored.sample.rollout].append(
                        -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                    )
        means += [torch.stack(losses[r]).mean() for r in rollouts]
    return torch.stack(means).mean()


def trained(checkpoint: Path, *batches: Batch, custom: Custom | None = None, **changes: Any) -> list[TrainReport]:
    settings = trainer_settings(checkpoint, **changes)
    if custom is not None:
        settings = replace(settings, custom=lambda: custom)
    with one_rank(settings) as rank:
        return [rank.train(batch) for batch in batches]


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_logprobs_loss_and_gradient_are_those_of_whole_unpacked_sequences(checkpoint: Path, max_tokens: int) -> None:
    batch = episode_batch()
    (report,) = trained(checkpoint, batch, use_rollout_logprobs=True, max_tokens_per_gpu=max_tokens)
    model, rows = plain_logprobs(checkpoint, batch, 0.8)
    for scored, logprobs, expected in zip(samples_of(batch), report.logprobs, rows, strict=True):
        mask = torch.tensor(scored.loss_mask, dtype=torch.bool)
        assert (torch.tensor(logprobs) - expected)[mask].abs().max() < 1e-5
        assert not torch.tensor(logprobs)[~mask].any()  # observations have none
    loss = expected_loss(batch, rows)
    loss.backward()  # type: ignore[no-untyped-call]  # torch is untyped
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert report.loss == pytest.approx(loss.item(), abs=1e-5)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def test_the_content_of_observations_is_context(checkpoint: Path) -> None:
    rng = random.Random(0)
    sample = sample_of([("turn", 3), ("observation", 4), ("turn", 3)], rng)
    other = replace(sample, token_ids=(*sample.token_ids[:3], 1, 2, 3, 4, *sample.token_ids[7:]))
    batches = [
        Batch(step=0, groups=(group_of(0, [each, sample], [1.0, 0.0], random.Random(1)),)) for each in (sample, other)
    ]
    (one,), (two,) = (trained(checkpoint, batch) for batch in batches)
    assert one.logprobs[0][:3] == pytest.approx(two.logprobs[0][:3], abs=1e-6)
    assert min(abs(a - b) for a, b in zip(one.logprobs[0][7:], two.logprobs[0][7:], strict=True)) > 1e-4


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_numbers_at_observations_change_nothing(checkpoint: Path, estimator: Any) -> None:
    batch = episode_batch(turn_rewards=True)

    def stray(scored: ScoredSample) -> ScoredSample:
        pairs = zip(scored.sample.logprobs, scored.loss_mask, strict=True)
        odd = array("f", [logprob if counts else math.nan for logprob, counts in pairs])
        return replace(scored, sample=replace(scored.sample, logprobs=odd))

    odd = replace(batch, groups=tuple(replace(g, samples=tuple(map(stray, g.samples))) for g in batch.groups))
    changes = {"advantage_estimator": estimator, "use_tis": estimator != "gspo", "use_opsm": True}
    plain, with_odd = (trained(checkpoint, each, each, **changes) for each in (batch, odd))
    assert [replace(each, seconds=0.0) for each in plain] == [replace(each, seconds=0.0) for each in with_odd]
    assert all(math.isfinite(number) for each in plain for number in (each.loss, *each.metrics.values()))


# ---- unknown log-probs


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rollout_logprobs": True},
        {"use_rollout_logprobs": True, "num_steps_per_rollout": 3},
        {"use_rollout_logprobs": True, "advantage_estimator": "gspo", "use_opsm": True},
        {"use_tis": True, "tis_level": "sequence"},
        {"use_tis": True, "tis_mode": "mask", "use_opsm": True, "num_steps_per_rollout": 3},
        {"use_rollout_logprobs": True, "advantage_estimator": "ppo"},
    ],
)
def test_unknown_logprobs_are_those_of_the_trainer_before_the_step(checkpoint: Path, changes: dict[str, Any]) -> None:
    batch = episode_batch()
    gaps = unknown(batch)
    (before,) = trained(checkpoint, batch)  # the log-probs of the first step do not depend on the loss
    filled = known(gaps, before.logprobs)
    with_gaps, without = (trained(checkpoint, each, lr=1e-2, **changes)[0] for each in (gaps, filled))
    metrics = dict(with_gaps.metrics)
    share = metrics.pop("train/unknown_logprobs")
    total = sum(sum(scored.loss_mask) for scored in samples_of(batch))
    count = sum(sum(map(math.isnan, scored.sample.logprobs)) for scored in samples_of(gaps))
    assert count > 10 and share == pytest.approx(count / total)
    assert metrics == pytest.approx(dict(without.metrics), rel=1e-5, abs=1e-7)
    assert (with_gaps.loss, with_gaps.grad_norm) == pytest.approx((without.loss, without.grad_norm), rel=1e-4, abs=1e-7)
    assert with_gaps.logprobs == without.logprobs
    assert is_declared("train/unknown_logprobs")


def test_no_metric_tells_of_unknown_logprobs_if_all_are_known(checkpoint: Path) -> None:
    (report,) = trained(checkpoint, episode_batch())
    assert "train/unknown_logprobs" not in report.metrics


def test_a_user_s_functions_see_no_unknown_logprob(checkpoint: Path) -> None:
    seen: list[StepSamples] = []

    def advantage(samples: StepSamples) -> torch.Tensor:
        seen.append(samples)
        return samples.outcomes_N

    def loss(logprobs: Any, old: Any, advantages: Any, mask: Any, lengths: Any) -> Any:
        assert old.isfinite().all()
        return -(logprobs - old).exp() * advantages, {}

    batch = unknown(episode_batch(turn_rewards=True))
    changes = {"use_rollout_logprobs": True, "custom_advantage_function_path": "x"}
    (report,) = trained(checkpoint, batch, custom=Custom(advantage=advantage, loss=loss), **changes)
    assert math.isfinite(report.loss) and math.isfinite(report.grad_norm)
    (samples,) = seen
    assert all(row.isfinite().all() for row in samples.behaviour_logprobs)
    scored = samples_of(batch)
    assert samples.rollouts_N.tolist() == [each.sample.rollout for each in scored]
    for each, places, rewards in zip(scored, samples.turns, samples.turn_rewards, strict=True):
        assert [place >= 0 for place in places.tolist()] == [bool(counts) for counts in each.loss_mask]
        assert len(rewards) == len(each.sample.turns) == places.max() + 1
    whole = [group.prompt.token_ids for group in batch.groups for _ in group.samples]
    for each, prompt, ids in zip(scored, whole, samples.token_ids, strict=True):
        assert tuple(ids.tolist()) == (each.sample.prompt_ids or prompt) + each.sample.token_ids


# ---- rollouts


@pytest.mark.parametrize("per_token", [False, True])
def test_the_step_does_not_depend_on_packing(checkpoint: Path, per_token: bool) -> None:
    batch = episode_batch(turn_rewards=True)
    layouts: list[dict[str, Any]] = [
        {"max_tokens_per_gpu": 10_000},
        {"max_tokens_per_gpu": 1},
        {"max_tokens_per_gpu": 30},
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
    ]
    reports = [
        trained(
            checkpoint, batch, batch, lr=1e-2, use_rollout_logprobs=True, calculate_per_token_loss=per_token, **each
        )
        for each in layouts
    ]
    for found in reports[1:]:
        for one, other in zip(reports[0], found, strict=True):
            assert (one.loss, one.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-4)


def test_splitting_an_answer_into_two_samples_of_a_rollout_keeps_its_weight() -> None:
    rng = random.Random(0)
    whole = [sample_of([("turn", length)], rng, index=index) for index, length in enumerate((4, 6))]
    split = [
        replace(sample_of([("turn", 3)], rng, index=0), rollout_index=0),
        replace(sample_of([("turn", 1)], rng, index=1), rollout_index=0),
        replace(whole[1], index=2, rollout_index=1),
    ]
    plain, parts = (
        Batch(step=0, groups=(group_of(0, samples, rewards, random.Random(1)),))
        for samples, rewards in ((whole, [1.0, 0.0]), (split, [1.0, 1.0, 0.0]))
    )
    for batch in (plain, parts):
        (update,) = updates_of(batch, 1)
        assert (update.num_rollouts, update.num_tokens) == (2, 10)
    assert [example.rollout_tokens for example in updates_of(parts, 1)[0].examples] == [4, 4, 6]


def as_episode(scored: ScoredSample) -> ScoredSample:
    """The same answer as an episode of one turn."""
    sample: Sample = scored.sample
    return replace(scored, sample=replace(sample, rollout_index=sample.index, prompt_ids=None))


def test_single_samples_of_a_rollout_give_the_same_bits_as_plain_answers(checkpoint: Path) -> None:
    batch = random_batch()
    groups = tuple(replace(group, samples=tuple(map(as_episode, group.samples))) for group in batch.groups)
    episodes = replace(batch, groups=groups)
    plain, other = (trained(checkpoint, each, each, use_rollout_logprobs=True) for each in (batch, episodes))
    assert [replace(each, seconds=0.0) for each in plain] == [replace(each, seconds=0.0) for each in other]


def test_uneven_groups_are_cut_into_updates_and_reported_in_order(checkpoint: Path) -> None:
    batch = episode_batch(groups=4)
    assert len({len(group.samples) for group in batch.groups}) > 1
    (report,) = trained(checkpoint, batch, num_steps_per_rollout=2)
    assert [len(row) for row in report.logprobs] == [len(each.loss_mask) for each in samples_of(batch)]
    updates = updates_of(batch, 2)
    rollouts = [len({each.sample.rollout for each in group.samples}) for group in batch.groups]
    assert [update.num_rollouts for update in updates] == [sum(rollouts[:2]), sum(rollouts[2:])]
