"""The kernels of packed attention: the head widths that they accept, and their results on a GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.engines.megatron.fast_step.attention import stretches_of
from asyncrl.engines.megatron.model.attention_kernels import (
    KERNEL_WIDTH,
    Stretches,
    attended_one_by_one,
    fits_flash_4,
    flash_2,
    flash_4,
    in_one_width,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("queries", "values"), [(16, 16), (20, 10), (24, 16), (12, 12), (192, 128), (10, 20)])
def test_heads_of_two_widths_go_through_a_kernel_that_takes_one(queries: int, values: int) -> None:
    torch.manual_seed(0)
    asked: list[list[int]] = []

    def kernel(query_TAD: Tensor, key_TAD: Tensor, value_TAD: Tensor) -> Tensor:
        asked.append([x.shape[-1] for x in (query_TAD, key_TAD, value_TAD)])
        return attended(query_TAD, key_TAD, value_TAD, queries)

    query, key, value = inputs = [torch.randn(7, 4, n, requires_grad=True) for n in (queries, queries, values)]
    expected, got = attended(query, key, value, queries), in_one_width(kernel, query, key, value)
    assert got.shape == (7, 4, values)
    torch.testing.assert_close(got, expected)
    weights = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, weights), torch.autograd.grad(expected, inputs, weights)
    )
    ((width, *others),) = asked
    assert width % KERNEL_WIDTH == 0
    assert others == [width, width]


def attended(query_TAD: Tensor, key_TAD: Tensor, value_TAD: Tensor, width: int) -> Tensor:
    query, key, value = (x.transpose(0, 1) for x in (query_TAD, key_TAD, value_TAD))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=width**-0.5).transpose(0, 1)


@pytest.mark.parametrize(
    ("query", "value", "fits"),
    [(128, 128, True), (192, 128, True), (256, 256, True), (512, 512, False), (100, 100, False), (16, 16, False)],
)
def test_flash_attention_4_is_for_heads_of_whole_widths_from_64_to_256(query: int, value: int, fits: bool) -> None:
    assert fits_flash_4(query, value) == fits


def test_fewer_tokens_than_keys_see_the_keys_before_them() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
    whole = attended_one_by_one(query, key, value, stretches_of((9,), (9,), CPU), 0.3)
    part = attended_one_by_one(query[6:], key, value, stretches_of((3,), (9,), CPU), 0.3)
    torch.testing.assert_close(part, whole[6:])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [flash_2, flash_4])
@pytest.mark.parametrize(("query_width", "value_width"), [(128, 128), (64, 64), (96, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize(
    ("num_tokens", "num_keys"),
    [((300, 77, 512, 1, 130), (300, 77, 512, 1, 130)), ((64, 64, 200, 200), (64, 128, 200, 800))],
)
def test_kernels_attend_as_plain_attention_does(
    kernel: Callable[[Tensor, Tensor, Tensor, Stretches, float], Tensor],
    query_width: int,
    value_width: int,
    num_tokens: tuple[int, ...],
    num_keys: tuple[int, ...],
) -> None:
    if kernel is flash_4 and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 4 is for Hopper GPUs")
    torch.manual_seed(0)
    shapes = [(sum(num_tokens), 8, query_width), (sum(num_keys), 2, query_width), (sum(num_keys), 2, value_width)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    stretches = stretches_of(num_tokens, num_keys, torch.device("cuda"))
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = attended_one_by_one(exact[0], exact[1], exact[2], stretches, query_width**-0.5)
    query, key, value = inputs
    got = kernel(query, key, value, stretches, query_width**-0.5)

    weights = torch.randn_like(expected)
    wanted = [expected, *torch.autograd.grad(expected, exact, weights)]
    found = [got, *torch.autograd.grad(got, inputs, weights.bfloat16())]
    apart = [float((one.float() - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)]
    assert max(apart) < 6e-3, apart  # bfloat16 has 8 bits: 4e-3
