"""The head widths that torch's kernel for GPUs accepts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.engines.megatron.model.attention import KERNEL_WIDTH, in_one_width


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
