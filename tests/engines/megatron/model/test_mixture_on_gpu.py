"""On a GPU, the fast mixture equals Megatron's within the rounding of bfloat16, and its host never waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from asyncrl.engines.megatron.model.build import build_model
from asyncrl.engines.megatron.model.experts import GroupedExperts
from asyncrl.engines.megatron.model.mixture_ops import (
    gather_sum,
    order_of,
    permute,
    plain_gather_sum,
    plain_swiglu,
    swiglu,
    unpermute,
    uses_kernels,
)
from asyncrl.engines.megatron.setup.gradient_norm import l2_norm
from asyncrl.models.shape import read_shape
from tests.engines.megatron.families import TINY, write_tiny
from tests.engines.megatron.layouts import layout, processes
from tests.engines.megatron.megatron_experts import make_plain
from tests.engines.megatron.tiny import free_port, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:::torch"),  # torch warns about calls by Megatron
]

BF16 = torch.bfloat16
ROUNDING = 2**-8
"""The relative error of a number rounded to bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    with processes(0, 1, free_port()), layout():
        yield


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail at the first operation that makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", BF16)


def close(found: torch.Tensor, exact: torch.Tensor, roundings: float = 1) -> None:
    """Compare with a float32 result: elements within ``roundings``, in units of the whole tensor's size."""
    scale = exact.float().abs().mean()
    torch.testing.assert_close(
        found.float(), exact.float(), rtol=roundings * ROUNDING, atol=float(roundings * ROUNDING * scale)
    )


@pytest.mark.parametrize(("rows", "ffn"), [(1, 8), (1000, 768), (333, 1408), (0, 64)])
def test_swiglu_and_its_gradients_are_the_plain_ones(rows: int, ffn: int) -> None:
    x_NF, grad_NF = random(rows, 2 * ffn), random(rows, ffn, seed=1)
    weights_N = torch.rand(rows, generator=torch.Generator().manual_seed(2)).cuda()
    fast, weights = x_NF.clone().requires_grad_(), weights_N.clone().requires_grad_()
    exact, exact_weights = x_NF.float().requires_grad_(), weights_N.clone().requires_grad_()
    assert uses_kernels(fast)
    assert not uses_kernels(exact)
    found, expected = swiglu(fast, weights), plain_swiglu(exact, exact_weights)
    found.backward(grad_NF)  # type: ignore[no-untyped-call]  # torch is untyped
    expected.backward(grad_NF.float())  # type: ignore[no-untyped-call]
    assert fast.grad is not None and exact.grad is not None
    assert weights.grad is not None and exact_weights.grad is not None
    if rows:
        close(found, expected)
        close(fast.grad, exact.grad)
        torch.testing.assert_close(weights.grad, exact_weights.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "k", "hidden"), [(1, 1, 64), (2048, 8, 2048), (100, 6, 3584)])
def test_gather_sum_is_the_plain_one(tokens: int, k: int, hidden: int) -> None:
    rows_NH = random(tokens * k, hidden)
    places_TK = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(1)).view(tokens, k).cuda()
    close(gather_sum(rows_NH, places_TK), plain_gather_sum(rows_NH.float(), places_TK))


def test_permutations_are_inverse_and_the_host_never_waits() -> None:
    hidden_TH, grads = random(4096, 512).requires_grad_(), random(4096, 512, seed=1)
    map_TE = torch.zeros(4096, 128, dtype=torch.bool, device="cuda")
    map_TE.scatter_(1, torch.rand(4096, 128, device="cuda").topk(8).indices, True)
    expected = map_TE.sum(0).cumsum(0)
    unpermute(permute(hidden_TH, order_of(map_TE, 8)), order_of(map_TE, 8))  # compiles
    with no_waiting():
        order = order_of(map_TE, 8)
        rows_NH = permute(hidden_TH, order)
        out_TH = unpermute(rows_NH, order)
        out_TH.backward(grads)  # type: ignore[no-untyped-call]
    assert order.ends_E.tolist() == expected.tolist()
    close(out_TH, 8 * hidden_TH.detach().float())
    assert hidden_TH.grad is not None
    close(hidden_TH.grad, 8 * grads.float())


def test_norms_of_gradients_are_computed_without_waiting() -> None:
    grads = [torch.randn(size, device="cuda") for size in (10, 1000, 3)]
    flag = torch.zeros(1, dtype=torch.int, device="cuda")
    with no_waiting():
        norm, _ = l2_norm(0, flag, [grads], False)
    assert norm.item() == pytest.approx(torch.cat(grads).norm().item(), rel=1e-5)


# ---- the whole layer


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("hf")
    sizes: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 192, "hidden_size": 256}
    return {
        "qwen3-moe": write_checkpoint(folder / "qwen3", moe=True, dtype="bfloat16", **sizes),
        "deepseek-v3": write_tiny(folder / "deepseek", TINY["deepseek-v3"], dtype="bfloat16"),
    }


def mixture(checkpoint: Path) -> Any:
    """The last mixture layer of the model in ``checkpoint``, with random weights."""
    model = build_model(read_shape(checkpoint), torch.device("cuda"), BF16)
    layer: Any = [module for module in model.modules() if isinstance(module, MoELayer)][-1]
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.zero_()
    return layer


def plain_copy(checkpoint: Path, layer: Any) -> Any:
    """The same layer with Megatron's experts and dispatcher."""
    other = mixture(checkpoint)
    stacked = layer.experts
    assert isinstance(stacked, GroupedExperts)
    make_plain(other)
    with torch.no_grad():
        for number, expert in enumerate(other.experts.local_experts):
            expert.linear_fc1.weight.copy_(stacked.weight1[number])
            expert.linear_fc2.weight.copy_(stacked.weight2[number])
    return other


def ran(layer: Any, tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output, and the gradient of its input; gradients of weights are left in their ``grad``."""
    hidden_THs = random(tokens, 1, hidden, seed=4).requires_grad_()
    output, _ = layer(hidden_THs)
    output.backward(random(tokens, 1, hidden, seed=5))
    assert hidden_THs.grad is not None
    return output.detach(), hidden_THs.grad


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative difference of two tensors as a whole."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_a_layer_and_its_gradients_are_those_of_megatron(checkpoints: dict[str, Path], family: str) -> None:
    fast = mixture(checkpoints[family])
    plain = plain_copy(checkpoints[family], fast)
    hidden = fast.config.hidden_size
    (output, grad), (expected, expected_grad) = (ran(layer, 777, hidden) for layer in (fast, plain))
    # Megatron rounds each expert's result and each partial sum to bfloat16.
    assert difference(output, expected) < 4 * ROUNDING
    assert difference(grad, expected_grad) < 4 * ROUNDING
    assert difference(fast.router.weight.grad, plain.router.weight.grad) < 4 * ROUNDING
    for number, expert in enumerate(plain.experts.local_experts):
        assert difference(fast.experts.weight1.grad[number], expert.linear_fc1.weight.grad) < 4 * ROUNDING
        assert difference(fast.experts.weight2.grad[number], expert.linear_fc2.weight.grad) < 4 * ROUNDING


def test_a_step_of_a_layer_never_waits_for_the_gpu(checkpoints: dict[str, Path]) -> None:
    layer = mixture(checkpoints["qwen3-moe"])
    ran(layer, 512, 256)  # compiles
    hidden_THs, grad = random(512, 1, 256).requires_grad_(), random(512, 1, 256, seed=1)
    with no_waiting():
        output, _ = layer(hidden_THs)
        output.backward(grad)
