"""The real Megatron on a CPU against transformers, one sample at a time, in float32."""

import gc
import math
import os
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.train.rollback import RestorePoint
from asyncrl.errors import NonFiniteLoss, WeightUpdateFailed
from asyncrl.types import Batch
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.tiny import one_rank, poisoned, random_batch, trainer_settings, write_checkpoint

GRADIENT_DESCENT: dict[str, float] = {"lr": 1e4, "adam_eps": 1e4, "clip_grad": 0.0, "weight_decay": 0.0}
"""Adam with an epsilon far above any gradient: the weights move by minus the gradient."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


def reference_logprobs(
    checkpoint: Path, batch: Batch, temperature: float
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The log-probs of every answer by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = []
    for group in batch.groups:
        for scored in group.samples:
            ids = torch.tensor(group.prompt.token_ids + scored.sample.token_ids)
            logits = model(ids[None], use_cache=False).logits[0, len(group.prompt.token_ids) - 1 : -1] / temperature
            rows.append(logits.log_softmax(-1).gather(1, ids[len(group.prompt.token_ids) :, None])[:, 0])
    return model, rows


def reference_loss(batch: Batch, rows: list[torch.Tensor]) -> torch.Tensor:
    """GRPO with PPO's clip at 0.2: the mean over each sample, then over samples.  Shares no code with the package."""
    losses = []
    flat = iter(rows)
    for group in batch.groups:
        rewards = torch.tensor([scored.reward for scored in group.samples])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for scored, advantage in zip(group.samples, advantages, strict=True):
            ratio = (next(flat) - torch.tensor(scored.sample.logprobs)).exp()
            mask = torch.tensor(scored.loss_mask, dtype=torch.float32)
            per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            losses.append((per_token * mask).sum() / mask.sum().clamp(min=1))
    return torch.stack(losses).mean()


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


def worst_difference(logprobs: Sequence[Sequence[float]], expected: list[torch.Tensor]) -> float:
    pairs = zip(logprobs, expected, strict=True)
    return max((torch.tensor(got) - row).abs().max().item() for got, row in pairs)


def trained(checkpoint: Path, target: Path, batch: Batch, **changes: Any) -> dict[str, torch.Tensor]:
    """The weights after one step."""
    with one_rank(trainer_settings(checkpoint, **changes)) as rank:
        rank.train(batch)
        rank.save(target)
    return weights_of(target)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moe", [False, True])
def test_logprobs_loss_and_gradient_are_those_of_transformers(tmp_path: Path, moe: bool, tied: bool) -> None:
    path = write_checkpoint(tmp_path / "hf", moe=moe, tied=tied)
    batch = random_batch()
    settings = trainer_settings(path, use_rollout_logprobs=True)
    model, expected = reference_logprobs(path, batch, settings.temperature)
    loss = reference_loss(batch, expected)
    loss.backward()  # type: ignore[no-untyped-call]  # torch is untyped
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    with one_rank(settings) as rank:
        report = rank.train(batch)
    assert [len(row) for row in report.logprobs] == [len(row) for row in expected]
    worst = worst_difference(report.logprobs, expected)
    assert worst < 1e-4
    assert report.loss == pytest.approx(loss.item(), rel=1e-4)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert 0 < report.clip_fraction < 1
    assert 0 < report.entropy < math.log(96)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("moe", "tied"), [(False, False), (True, True)])
def test_weights_come_back_bit_by_bit(tmp_path: Path, moe: bool, tied: bool, dtype: str) -> None:
    path = write_checkpoint(tmp_path / "hf", moe=moe, tied=tied, dtype=dtype)
    with one_rank(trainer_settings(path)) as rank:
        rank.save(tmp_path / "out")
    before, after = weights_of(path), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_written_for_engines_equal_those_sent(tmp_path: Path, dtype: str) -> None:
    path = write_checkpoint(tmp_path / "hf", moe=True)
    (path / "tokenizer.json").write_text("{}")
    with one_rank(trainer_settings(path, dtype=dtype)) as rank:
        rank.train(random_batch())
        rank.save(tmp_path / "saved")
        for _ in range(2):  # the second time over the first
            rank.write_weights(tmp_path / "written")
        buckets = rank.weight_buckets()
        (tmp_path / "file").touch()
        with pytest.raises(WeightUpdateFailed, match="file/no: the weights cannot be written: Not a directory"):
            rank.write_weights(tmp_path / "file" / "no")
    saved, written = weights_of(tmp_path / "saved"), weights_of(tmp_path / "written")
    assert list(saved) == list(written)
    assert all(torch.equal(tensor, saved[name].to(getattr(torch, dtype))) for name, tensor in written.items())
    assert {str(tensor.dtype) for tensor in written.values()} == {f"torch.{dtype}"}
    assert sum(bucket.num_bytes for bucket in buckets) == sum(tensor.nbytes for tensor in written.values())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "hf", "saved", "written"]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "written") is not None


def test_a_checkpoint_in_several_files_is_read_and_written(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    monkeypatch.setattr("asyncrl.engines.megatron.checkpoint.hf_files.SHARD_BYTES", 20_000)
    with one_rank(trainer_settings(tmp_path / "hf")) as rank:
        rank.save(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert largest_difference(model.state_dict(), again.state_dict()) == 0.0


def test_a_saved_model_loads_in_transformers_and_gives_the_same_log_probs(tmp_path: Path, checkpoint: Path) -> None:
    batch = random_batch()
    with one_rank(trainer_settings(checkpoint)) as rank:
        rank.train(batch)
        (tmp_path / "out.partial").mkdir()  # as a crash leaves it
        rank.save(tmp_path / "out")
        rank.save(tmp_path / "out")
        after = rank.train(batch).logprobs
    _, expected = reference_logprobs(tmp_path / "out", batch, 0.8)
    worst = worst_difference(after, expected)
    assert worst < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_and_gradients_do_not_depend_on_packing(tmp_path: Path, checkpoint: Path, per_token: bool) -> None:
    batch = random_batch()
    common = {"calculate_per_token_loss": per_token, "use_rollout_logprobs": True, **GRADIENT_DESCENT}
    reports, weights = [], []
    for max_tokens in (8, 37, 4096):
        with one_rank(trainer_settings(checkpoint, max_tokens_per_gpu=max_tokens, **common)) as rank:
            reports.append(rank.train(batch))
            rank.save(tmp_path / str(max_tokens))
        weights.append(weights_of(tmp_path / str(max_tokens)))
    assert largest_difference(weights[0], weights_of(checkpoint)) > 1e-2  # it did move
    for report, moved in zip(reports[1:], weights[1:], strict=True):
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-6)
        assert report.grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-5)
        assert largest_difference(moved, weights[0]) < 1e-6


@pytest.mark.parametrize("modules", [("layernorm",), ("moe_act",), ("core_attn", "layernorm", "mlp", "moe")])
def test_parts_that_are_recomputed_give_the_same_numbers(tmp_path: Path, modules: tuple[Any, ...]) -> None:
    path = write_checkpoint(tmp_path / "hf", moe=True)
    settings = trainer_settings(path, num_steps_per_rollout=2)  # with a pass without gradients
    reports = []
    for parallel in (ParallelConfig(), ParallelConfig(recompute_granularity="selective", recompute_modules=modules)):
        with one_rank(replace(settings, parallel=parallel)) as rank:
            reports.append(rank.train(random_batch()))
    kept, again = reports
    assert again.grad_norm == pytest.approx(kept.grad_norm, rel=1e-5)
    assert [list(row) for row in again.logprobs] == [list(row) for row in kept.logprobs]


def test_a_step_makes_rewarded_answers_likelier(checkpoint: Path) -> None:
    batch = random_batch(groups=6)
    with one_rank(trainer_settings(checkpoint, lr=1e-3)) as rank:
        before, after = (rank.train(batch).logprobs for _ in range(2))
    gains = iter([sum(new) - sum(old) for old, new in zip(before, after, strict=True)])
    for group in batch.groups:
        rewards = [scored.reward for scored in group.samples]
        mean = sum(rewards) / len(rewards)
        advantage_times_gain = sum((reward - mean) * next(gains) for reward in rewards)
        assert advantage_times_gain > 0 or len(set(rewards)) == 1


def test_the_same_batch_gives_the_same_bits(tmp_path: Path, checkpoint: Path) -> None:
    batch = random_batch()
    once, again = (trained(checkpoint, tmp_path / name, batch) for name in "ab")
    assert all(torch.equal(once[name], again[name]) for name in once)


def test_several_updates_report_log_probs_from_before_the_step(checkpoint: Path) -> None:
    batch = random_batch(groups=5)
    _, expected = reference_logprobs(checkpoint, batch, 0.8)
    with one_rank(trainer_settings(checkpoint, num_steps_per_rollout=3)) as rank:
        report = rank.train(batch)
    worst = worst_difference(report.logprobs, expected)
    assert worst < 1e-4


def test_the_second_update_is_clipped_against_the_start_of_the_step(checkpoint: Path) -> None:
    batch = random_batch(groups=2)
    twice = replace(batch, groups=(batch.groups[0], batch.groups[0]))
    with one_rank(trainer_settings(checkpoint, num_steps_per_rollout=2, lr=1e-2)) as rank:
        report = rank.train(twice)
    assert report.clip_fraction > 0  # the first update moved the ratios of the same tokens


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("first_a_good_step", [False, True])
def test_a_loss_that_is_not_finite_changes_nothing(
    tmp_path: Path, checkpoint: Path, updates: int, first_a_good_step: bool
) -> None:
    batch = random_batch()
    settings = trainer_settings(checkpoint, use_rollout_logprobs=True, num_steps_per_rollout=updates)
    with one_rank(settings) as rank:
        if first_a_good_step:
            rank.train(batch)
        rank.save(tmp_path / "before")
        with pytest.raises(NonFiniteLoss, match="loss nan"):
            rank.train(poisoned(batch, 3))
        rank.save(tmp_path / "after")
        rank.train(batch)
        rank.save(tmp_path / "on")
    assert largest_difference(weights_of(tmp_path / "before"), weights_of(tmp_path / "after")) == 0.0
    with one_rank(settings) as rank:  # nor is anything left behind in the optimizer
        for _ in range(1 + first_a_good_step):
            rank.train(batch)
        rank.save(tmp_path / "without")
    assert largest_difference(weights_of(tmp_path / "on"), weights_of(tmp_path / "without")) == 0.0


@pytest.mark.parametrize("step", [None, 3])
def test_rollback_restores_step_counts_of_parameter_groups(step: int | None) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (group,) = optimizer.param_groups
    if step is not None:
        group["step"] = step  # as TransformerEngine's Adam does from its first step on
    point = RestorePoint(model, SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)]))
    group["step"] = 7
    point.restore()
    assert group.get("step") == step


def test_a_nan_reward_changes_nothing(checkpoint: Path) -> None:
    batch = random_batch()
    group = batch.groups[0]
    bad = replace(group, samples=(replace(group.samples[0], reward=math.nan), *group.samples[1:]))
    with one_rank(trainer_settings(checkpoint)) as rank, pytest.raises(NonFiniteLoss):
        rank.train(replace(batch, groups=(bad, *batch.groups[1:])))


def test_weight_decay_applies_to_matrices_and_not_to_norms(tmp_path: Path, checkpoint: Path) -> None:
    alike = random_batch()
    alike = replace(
        alike,
        groups=tuple(
            replace(group, samples=tuple(replace(scored, reward=1.0) for scored in group.samples))
            for group in alike.groups
        ),
    )  # no advantage, so nothing but decay moves a weight
    before, after = weights_of(checkpoint), trained(checkpoint, tmp_path / "after", alike, lr=0.1, weight_decay=0.5)
    for name, weight in before.items():
        expected = weight if "norm" in name else weight * (1 - 0.1 * 0.5)
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-7)


def test_the_learning_rate_warms_up_and_stays_constant(checkpoint: Path) -> None:
    with one_rank(trainer_settings(checkpoint, lr=1e-3, lr_warmup_iters=4)) as rank:
        rates = [rank.train(random_batch(groups=1, step=step)).learning_rate for step in (0, 1, 3, 9)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 1e-3, 1e-3])


def test_an_answer_without_tokens_leaves_the_loss_finite(checkpoint: Path) -> None:
    batch = random_batch(groups=1)
    group = batch.groups[0]
    empty = replace(
        group.samples[0],
        sample=replace(group.samples[0].sample, token_ids=(), logprobs=array("f"), spans=()),
        loss_mask=(),
    )
    with one_rank(trainer_settings(checkpoint)) as rank:
        report = rank.train(replace(batch, groups=(replace(group, samples=(empty, *group.samples[1:])),)))
    assert report.logprobs[0] == array("f")
    assert math.isfinite(report.loss)


def test_bfloat16_is_sent_and_float32_is_saved(tmp_path: Path, checkpoint: Path) -> None:
    batch = random_batch()
    _, expected = reference_logprobs(checkpoint, batch, 0.8)
    with one_rank(trainer_settings(checkpoint, dtype="bfloat16", lr=1e-5)) as rank:
        report = rank.train(batch)
        rank.save(tmp_path / "out")
        assert {dtype for bucket in rank.weight_buckets() for dtype in bucket.dtypes} == {"bfloat16"}
    worst = worst_difference(report.logprobs, expected)
    assert 0 < worst < 0.2
    moved = weights_of(tmp_path / "out")["model.embed_tokens.weight"]
    assert moved.dtype == torch.float32
    assert not torch.equal(moved, moved.bfloat16().float())  # the optimizer's own copy


@pytest.mark.parametrize("moe", [False, True])
def test_buckets_hold_every_tensor_once_within_their_size(tmp_path: Path, moe: bool) -> None:
    path = write_checkpoint(tmp_path / "hf", moe=moe, tied=True)
    with one_rank(trainer_settings(path, update_weight_buffer_size=20_000)) as rank:
        buckets = rank.weight_buckets()
    expected = {name: (tuple(tensor.shape), "float32") for name, tensor in weights_of(path).items()}
    told = [row for bucket in buckets for row in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True)]
    assert {name: (shape, dtype) for name, shape, dtype in told} == expected
    assert len(told) == len(expected)
    assert len(buckets) > 1
    assert all(bucket.num_bytes <= 20_000 for bucket in buckets)


def test_the_expert_routing_bias_stays_in_float32_and_is_not_trained(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "hf", TINY["glm4.5"])
    with one_rank(trainer_settings(checkpoint, dtype="bfloat16")) as rank:
        rank.train(random_batch(groups=2))
        rank.save(tmp_path / "out")
    before, after = weights_of(checkpoint), weights_of(tmp_path / "out")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(before[name], after[name])
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_a_closed_rank_frees_its_model_and_threads(tmp_path: Path) -> None:
    settings = trainer_settings(write_checkpoint(tmp_path))
    left: list[int] = []
    for _ in range(2):  # torch keeps some threads from the first one on
        with one_rank(settings) as rank:
            rank.train(random_batch())
            model = weakref.ref(rank._model)  # noqa: SLF001
            open_threads = len(os.listdir("/proc/self/task"))
        del rank
        gc.collect()
        assert model() is None
        left.append(threads_left(min([open_threads - 1, *left])))
        assert left[-1] < open_threads  # those of its groups
    assert left[1] <= left[0]


def threads_left(most: int) -> int:
    """The threads of this process once there are at most ``most``; one that was joined is there for a moment."""
    deadline = time.monotonic() + 10.0
    while (found := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
