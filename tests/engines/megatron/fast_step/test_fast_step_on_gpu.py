"""The check of fast operations on a GPU: kernels at the widths of real models equal their plain forms."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.fast_step.check import FastOperations, check_fast_step, operations_in_use
from asyncrl.engines.megatron.fast_step.sizes import AttentionSizes, ExpertSizes, HeadSizes, StepSizes
from asyncrl.engines.megatron.setup.gradient_norm import use_foreach_norms
from asyncrl.errors import FastStepWrong
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import layout, processes
from tests.engines.megatron.tiny import free_port, one_rank, trainer_settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:::torch"),  # torch warns about calls by Megatron
    pytest.mark.filterwarnings("ignore::UserWarning"),  # FlashAttention 4, when it compiles
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the same: it calls old names of its compiler
]

WIDE = AttentionSizes(num_heads=32, num_kv_heads=4, query_width=128, value_width=128, scale=128**-0.5)
LATENT = AttentionSizes(num_heads=16, num_kv_heads=16, query_width=192, value_width=128, scale=0.1147)
WORKSPACES = 2**27
"""Bytes that cuBLAS keeps, at most; the gradient of the output matrix alone has 600 MB."""
NARROW, WIDEST = replace(WIDE, query_width=64, value_width=64), replace(WIDE, query_width=256, value_width=256)
EXPERTS = ExpertSizes(num_experts=128, num_chosen=8, ffn_hidden_size=768)


@pytest.fixture
def one_process() -> Iterator[None]:
    with processes(0, 1, free_port()), layout():
        use_foreach_norms()
        yield


def sizes(attention: AttentionSizes, experts: ExpertSizes | None, hidden_size: int = 2048) -> StepSizes:
    return StepSizes(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        hidden_size=hidden_size,
        attention=attention,
        head=HeadSizes(vocab_size=151_936, temperature=0.8),
        experts=experts,
        train=TrainConfig(),
    )


def in_use(sizes: StepSizes) -> FastOperations:
    weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    return operations_in_use(sizes, SimpleNamespace(optimizer=torch.optim.AdamW([weight])))


MODELS = {
    "dense": sizes(WIDE, None),
    "dense, first of two context-parallel ranks": sizes(replace(WIDE, context_size=2), None),
    "dense, second of two context-parallel ranks": sizes(replace(WIDE, context_rank=1, context_size=2), None),
    "heads of 64": sizes(NARROW, None),
    "heads of 256": sizes(WIDEST, None),
    "mixture": sizes(WIDE, EXPERTS),
    "mixture with latent attention": sizes(LATENT, ExpertSizes(num_experts=64, num_chosen=6, ffn_hidden_size=1408)),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("model", MODELS)
def test_operations_at_real_widths_are_equal_and_the_memory_is_free_afterwards(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.cuda.synchronize()
    before, generators = torch.cuda.memory_allocated(), (torch.get_rng_state(), torch.cuda.get_rng_state())
    torch.cuda.reset_peak_memory_stats()
    lines = check_fast_step(MODELS[model], in_use(MODELS[model]))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    with capsys.disabled():
        print("", *lines, f"peak {peak:.1f} GiB", sep=f"\n{model}: ")  # noqa: T201
    assert len(lines) == (4 if MODELS[model].experts is None else 7)
    assert torch.cuda.memory_allocated() - before < WORKSPACES
    assert torch.equal(generators[0], torch.get_rng_state())
    assert torch.equal(generators[1], torch.cuda.get_rng_state())


def doubled(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given: 2 * operation(*given)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("attend", "FlashAttention"),
        ("gather_sum", "gather-and-sum of experts"),
        ("swiglu", "SwiGLU of experts"),
        ("experts", "stacked experts"),
        ("norm", "gradient norm"),
    ],
)
def test_a_wrong_kernel_is_named(operation: str, name: str) -> None:
    small = replace(MODELS["mixture"], hidden_size=256, head=HeadSizes(vocab_size=1000, temperature=1.0))
    operations = in_use(small)
    wrong: dict[str, Any] = {operation: doubled(getattr(operations, operation))}
    with pytest.raises(FastStepWrong, match=f"rank 0, {name}"):
        check_fast_step(small, replace(operations, **wrong))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_a_trainer_checks_its_own_model(tmp_path: Path, family: str) -> None:
    settings = trainer_settings(write_tiny(tmp_path, TINY[family], dtype="bfloat16"))
    with one_rank(replace(settings, device="cuda", dtype="bfloat16")) as rank:
        lines = rank.check_fast_step()
    assert lines[0].startswith("fast step, FlashAttention")
