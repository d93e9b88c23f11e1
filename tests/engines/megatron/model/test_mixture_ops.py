"""Permutations by gathers, and their gradients, equal Megatron's; the Triton kernels equal the plain forms."""

import os
import subprocess

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from asyncrl.engines.megatron.model.mixture_ops import (
    order_of,
    order_of_chunks,
    permute,
    plain_gather_sum,
    plain_swiglu,
    swiglu,
    unpermute,
)
from tests.engines.megatron.model import kernel_process
from tests.programs import ROOT, program

DEADLINE_S = 360


def routed(tokens: int, experts: int, k: int, *, unused: int = 0) -> tuple[Tensor, Tensor]:
    """A routing map and float32 routing weights; the last ``unused`` experts get no token."""
    generator = torch.Generator().manual_seed(tokens + experts)
    scores_TE = torch.rand(tokens, experts, generator=generator)
    scores_TE[:, experts - unused :] = -1.0
    chosen_TK = scores_TE.topk(k).indices
    map_TE = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen_TK, True)
    return map_TE, scores_TE.abs() * map_TE


@pytest.mark.parametrize(("tokens", "experts", "k", "unused"), [(17, 8, 3, 0), (1, 4, 4, 0), (40, 300, 2, 290)])
def test_permutations_and_gradients_are_those_of_megatron(tokens: int, experts: int, k: int, unused: int) -> None:
    map_TE, probs_TE = routed(tokens, experts, k, unused=unused)
    found: list[list[Tensor]] = []
    for ours in (True, False):
        hidden_TH = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
        probs = probs_TE.clone().requires_grad_()
        if ours:
            order = order_of(map_TE, k)
            rows_NH, weights_N = permute(hidden_TH, order), order.weights(probs)
            out_TH = unpermute(rows_NH * weights_N[:, None], order)
        else:
            rows_NH, given, places, _, _ = moe_utils.permute(hidden_TH, map_TE, probs, num_out_tokens=tokens * k)
            assert given is not None
            weights_N = given
            out_TH = moe_utils.unpermute(rows_NH * weights_N[:, None], places, hidden_TH.shape, routing_map=map_TE)
        (out_TH * torch.arange(6)).sum().backward()  # type: ignore[no-untyped-call]  # torch is untyped
        assert hidden_TH.grad is not None and probs.grad is not None
        found.append([rows_NH, weights_N, out_TH, hidden_TH.grad, probs.grad])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert order_of(map_TE, k).ends_E.tolist() == map_TE.sum(0).cumsum(0).tolist()


def test_a_zero_routing_weight_keeps_its_expert() -> None:
    map_TE = torch.tensor([[False, True, True, False], [True, False, False, True]])
    probs_TE = torch.tensor([[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    order = order_of(map_TE, 2)
    assert order.experts_N.tolist() == [0, 1, 2, 3]
    assert order.sources_N.tolist() == [1, 0, 0, 1]
    assert order.weights(probs_TE).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_received_chunks_are_sorted_as_by_megatron_and_return_to_their_order() -> None:
    counts_CE = torch.tensor([[2, 0, 3], [1, 4, 0]])
    rows_NH = torch.randn(10, 4)
    order = order_of_chunks(counts_CE, 10)
    by_expert = torch.arange(6).view(2, 3).T.ravel()
    expected, _ = moe_utils.sort_chunks_by_idxs(rows_NH, counts_CE.ravel(), by_expert)
    assert torch.equal(permute(rows_NH, order), expected)
    assert torch.equal(unpermute(expected, order), rows_NH)
    assert order.ends_E.tolist() == [3, 7, 10]


def test_plain_swiglu_passes_a_numerical_check_of_its_gradients() -> None:
    x_NF = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weights_N = torch.rand(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(swiglu, (x_NF, weights_N))
    assert torch.equal(swiglu(x_NF, weights_N), plain_swiglu(x_NF, weights_N))


def test_gather_sum_adds_up_the_rows_of_each_token() -> None:
    rows_NH = torch.arange(8.0).view(4, 2)
    assert plain_gather_sum(rows_NH, torch.tensor([[0, 3], [2, 1]])).tolist() == [[6.0, 8.0], [6.0, 8.0]]


@pytest.mark.timeout(2 * DEADLINE_S)
def test_kernels_in_triton_s_interpreter_equal_the_plain_forms() -> None:
    pytest.importorskip("triton")
    command, environment = program(kernel_process.__name__), {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=DEADLINE_S, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
