"""The check of fast operations before training, on a CPU."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.fast_step.check import check_fast_step
from asyncrl.engines.megatron.fast_step.differences import absolute, relative
from asyncrl.engines.megatron.fast_step.sizes import AttentionSizes, ExpertSizes, HeadSizes, StepSizes
from asyncrl.engines.megatron.weights.sharding import local_weights
from asyncrl.errors import FastStepWrong
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.fast_step import fast_step_process
from tests.engines.megatron.fast_step.wrong_operations import PLAIN, WRONG
from tests.engines.megatron.layouts import layout, processes
from tests.engines.megatron.tiny import free_port, one_rank, random_batch, trainer_settings
from tests.forks import Fork

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

DEADLINE_S = 720
"""Limit for a process that imports Megatron, which takes 10 to 50 s on two shared cores."""
SIZES = StepSizes(
    device=torch.device("cpu"),
    dtype=torch.float32,
    hidden_size=32,
    attention=AttentionSizes(num_heads=4, num_kv_heads=2, query_width=16, value_width=12, scale=0.2),
    head=HeadSizes(vocab_size=96, temperature=0.8),
    experts=ExpertSizes(num_experts=6, num_chosen=2, ffn_hidden_size=16),
    train=TrainConfig(),
)
BF16 = replace(SIZES, dtype=torch.bfloat16)


def names(lines: tuple[str, ...]) -> list[str]:
    return [line.removeprefix("fast step, ").split(":")[0] for line in lines]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "glm4.5", "deepseek-v3"])
def test_a_trainer_s_own_operations_are_equal(tmp_path: Path, family: str, dtype: str) -> None:
    settings = trainer_settings(write_tiny(tmp_path, TINY[family]), dtype=dtype)
    with one_rank(settings) as rank:
        lines = rank.check_fast_step()
    experts = [] if family == "qwen3" else ["stacked experts"]
    assert names(lines) == ["log-prob head", *experts, "gradient norm", "fused AdamW"]
    assert all("limit" in line for line in lines)


def trained(settings: Any, *, is_checked: bool) -> tuple[list[Any], dict[str, torch.Tensor], torch.Tensor]:
    """Train two steps; return losses, norms and log-probs, the weights and the state of torch's generator."""
    with one_rank(settings) as rank:
        if is_checked:
            rank.check_fast_step()
        reports = [rank.train(random_batch(step=step, seed=step)) for step in range(2)]
        weights = {name: part.detach().clone() for name, part in local_weights(rank._model).items()}  # noqa: SLF001
    return [(each.loss, each.grad_norm, each.logprobs) for each in reports], weights, torch.get_rng_state()


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_training_is_the_same_with_and_without_the_check(tmp_path: Path, family: str) -> None:
    settings = trainer_settings(write_tiny(tmp_path, TINY[family]))
    (plain, weights, generator), (checked, others, other) = (trained(settings, is_checked=is_) for is_ in (False, True))
    assert checked == plain
    assert torch.equal(generator, other)
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_plain_operations_are_equal_in_both_dtypes_and_in_pieces_of_samples() -> None:
    pieces = replace(SIZES, attention=replace(SIZES.attention, context_rank=1, context_size=2))
    with processes(0, 1, free_port()), layout():
        found = [check_fast_step(sizes, PLAIN) for sizes in (SIZES, BF16, pieces)]
    assert [len(lines) for lines in found] == [7, 7, 7]


def test_a_stage_without_head_and_experts_checks_the_rest() -> None:
    with processes(0, 1, free_port()), layout():
        lines = check_fast_step(replace(SIZES, head=None, experts=None), PLAIN)
    assert names(lines) == ["FlashAttention 2", "gradient norm", "fused AdamW"]


@pytest.mark.parametrize("sizes", [SIZES, BF16], ids=["float32", "bfloat16"])
def test_a_wrong_operation_is_found_and_named(sizes: StepSizes) -> None:
    errors = {}
    with processes(0, 1, free_port()), layout():
        for case, (_, wrong) in WRONG.items():
            with pytest.raises(FastStepWrong) as raised:
                check_fast_step(sizes, replace(PLAIN, **wrong))
            errors[case] = str(raised.value)
    for case, (name, _) in WRONG.items():
        assert errors[case].startswith(f"check-fast-step: rank 0, {name}: "), case
        assert errors[case].endswith("; nothing was trained"), case
        assert errors[case].count(" rank ") == 1, f"{case}: other operations are right"
        assert "\n" not in errors[case]
    assert "RuntimeError: no kernel image is available (set dtype" in errors["attention that fails"]
    assert "difference nan in" in errors["head with NaN"]
    assert "in gradient of the tokens, limit" in errors["experts without some gradients"]


@pytest.mark.timeout(2 * DEADLINE_S)
def test_tensor_parallel_ranks_agree_on_what_is_wrong(tmp_path: Path) -> None:
    checkpoint, port = write_tiny(tmp_path, TINY["qwen3"]), free_port()
    with Fork(fast_step_process.__name__, 1, port, checkpoint, stdout=subprocess.PIPE) as other:
        try:
            mine = json.loads(json.dumps(fast_step_process.run(0, port, checkpoint)))
            theirs = json.loads(other.communicate(timeout=DEADLINE_S)[0].splitlines()[-1])
        finally:
            other.kill()
    assert mine == theirs
    for case in ("trainer", "right", "right again"):
        assert names(mine[case]) == ["log-prob head", "gradient norm", "fused AdamW", "log-prob head of 2 ranks"]
    assert mine["fails"].startswith("check-fast-step: rank 1, log-prob head: RuntimeError: no kernel image")
    assert mine["not a number"].startswith("check-fast-step: rank 1, log-prob head: difference nan")
    assert mine["wrong in a group"].startswith("check-fast-step: rank 1, log-prob head of 2 ranks: difference")


def test_a_difference_is_that_of_the_whole_or_of_one_row() -> None:
    exact = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert relative(exact.clone(), exact) == 0
    assert relative(exact * 1.01, exact) == pytest.approx(0.01)
    row = exact.clone()
    row[7] = 0
    assert relative(row, exact) == pytest.approx(0.125, rel=0.2)
    assert absolute(exact + 0.5, exact) == pytest.approx(0.5)
    assert absolute(row, exact) == pytest.approx(float(exact[7].abs().max()) / 4)


@pytest.mark.parametrize("measure", [relative, absolute])
def test_wrong_shapes_differ_without_limit_and_nothing_equals_nothing(measure: Any) -> None:
    assert measure(torch.zeros(2, 3), torch.zeros(3, 2)) == float("inf")
    assert measure(torch.zeros(0, 3), torch.zeros(0, 3)) == 0
    assert measure(torch.zeros(2, 3), torch.zeros(2, 3)) == 0
    assert not measure(torch.full((2, 3), torch.nan), torch.ones(2, 3)) <= 1
