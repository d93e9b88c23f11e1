"""The memory that a trainer offloads while engines have the device comes back bit by bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config.areas.parallel import ParallelConfig
from asyncrl.engines.megatron.train.offload import HostMemory, Stash
from tests.engines.megatron.tiny import one_rank, random_batch, trainer_settings, write_checkpoint

KINDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "parallel": ParallelConfig(use_distributed_optimizer=False)},
    {"dtype": "float32", "advantage_estimator": "ppo"},
]


def weights_after(rank: Any, folder: Path) -> dict[str, torch.Tensor]:
    rank.save(folder)
    return load_file(folder / "model.safetensors")


def bytes_left(rank: Any) -> dict[str, int]:
    """Bytes of the three parts of the trainer's memory that are on the device."""
    learners = [rank._learner, *([rank._critic.learner] if rank._critic else [])]  # noqa: SLF001
    weights = [parameter for learner in learners for parameter in learner.model.parameters()]
    gradients = [buffer.grad_data for learner in learners for buffer in learner.parallel.buffers]
    states = [
        value
        for learner in learners
        for part in getattr(learner.optimizer, "chained_optimizers", [learner.optimizer])
        for parameter, state in part.optimizer.state.items()
        for value in (parameter, *state.values())
        if torch.is_tensor(value) and value.numel() > 1
    ]
    return {
        name: sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for name, tensors in {"weights": weights, "gradients": gradients, "optimizer": states}.items()
    }


@pytest.mark.parametrize("kind", KINDS, ids=["float32", "bfloat16", "whole optimizer", "with a critic"])
def test_offloading_does_not_change_training(tmp_path: Path, kind: dict[str, Any]) -> None:
    settings = trainer_settings(write_checkpoint(tmp_path / "hf"), **kind)
    with one_rank(settings) as rank:
        for step in range(3):
            rank.train(random_batch(step=step, seed=step))
        expected = weights_after(rank, tmp_path / "straight")
    with one_rank(settings) as rank:
        for step in range(3):
            rank.put_away_optimizer()  # before the first step, too, when there is no state
            rank.put_away_weights()
            rank.fetch()
            rank.train(random_batch(step=step, seed=step))
        found = weights_after(rank, tmp_path / "in turns")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_offloading_frees_the_device(tmp_path: Path) -> None:
    with one_rank(trainer_settings(write_checkpoint(tmp_path / "hf"), dtype="bfloat16")) as rank:
        rank.train(random_batch())
        before = bytes_left(rank)
        assert all(before.values())
        rank.put_away_optimizer()
        assert bytes_left(rank) == {"weights": before["weights"], "gradients": 0, "optimizer": 0}
        rank.put_away_weights()
        rank.put_away_weights()  # as often as one likes
        assert not any(bytes_left(rank).values())
        rank.fetch()
        rank.fetch()
        assert bytes_left(rank) == before


def test_weights_are_shared_while_the_optimizer_is_away(tmp_path: Path) -> None:
    settings = replace(trainer_settings(write_checkpoint(tmp_path / "hf"), update_weight_buffer_size=20_000))
    with one_rank(settings) as rank:
        rank.train(random_batch())
        expected = weights_after(rank, tmp_path / "saved")
        rank.put_away_optimizer()
        found: dict[str, torch.Tensor] = {}
        for number, bucket in enumerate(rank.weight_buckets()):
            assert rank.share(number)
            flat, start = rank._weight_sender._shared, 0  # noqa: SLF001
            assert flat is not None and flat.is_shared()  # type: ignore[no-untyped-call]  # torch is untyped
            for name, shape in zip(bucket.names, bucket.shapes, strict=True):
                found[name] = flat.view(torch.float32)[start : start + torch.Size(shape).numel()].view(shape).clone()
                start += torch.Size(shape).numel()
        rank.unshare()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_views_of_one_storage_come_back_together() -> None:
    whole = torch.arange(10.0)
    first, last = whole[:5], whole[5:].view(5, 1)
    stash = Stash(lambda: [first, last, whole], keeps=True)
    stash.put_away()
    assert whole.untyped_storage().nbytes() == 0
    stash.fetch()
    assert torch.equal(whole, torch.arange(10.0))
    assert last[4] == 9.0


def test_host_memory_grows_and_is_used_again() -> None:
    host = HostMemory()
    first = host.parts([10, 100])
    again = host.parts([100, 10])
    assert [len(part) for part in (*first, *again)] == [10, 100, 100, 10]
    assert first[0].data_ptr() == again[0].data_ptr()
    assert first[1].data_ptr() - first[0].data_ptr() == 64
    assert len(host.parts([1000])[0]) == 1000
