"""The Triton kernels of the mixture against their plain forms, on the CPU.

TRITON_INTERPRET=1 python -m tests.engines.megatron.model.kernel_process
"""

import torch

from asyncrl.engines.megatron.model import mixture_kernels
from asyncrl.engines.megatron.model.mixture_ops import plain_gather_sum, plain_swiglu

CASES = ((1, 1, 16, 8), (7, 3, 40, 24), (5, 8, 64, 17))
"""Tokens, experts of a token, hidden size, FFN hidden size: powers of two and others."""


def compare(tokens: int, k: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
    """Raise AssertionError unless values and gradients agree within the rounding of ``dtype``."""
    generator = torch.Generator().manual_seed(tokens)
    rows_NH = torch.randn(tokens * k, hidden, generator=generator).to(dtype)
    places_TK = torch.randperm(tokens * k, generator=generator).view(tokens, k)
    close(mixture_kernels.gather_sum(rows_NH, places_TK), plain_gather_sum(rows_NH.float(), places_TK), dtype)
    x_NF = torch.randn(tokens * k, 2 * ffn, generator=generator).to(dtype)
    weights_N = torch.rand(tokens * k, generator=generator)
    grad_NF = torch.randn(tokens * k, ffn, generator=generator).to(dtype)
    exact, weights = x_NF.float().requires_grad_(), weights_N.clone().requires_grad_()
    expected = plain_swiglu(exact, weights)
    expected.backward(grad_NF.float())  # type: ignore[no-untyped-call]  # torch is untyped
    x_grad_NF, weight_grad_N = mixture_kernels.swiglu_backward(x_NF, weights_N, grad_NF)
    assert exact.grad is not None and weights.grad is not None
    close(mixture_kernels.swiglu(x_NF, weights_N), expected.detach(), dtype)
    close(x_grad_NF, exact.grad, dtype)
    close(weight_grad_N, weights.grad, torch.float32)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise AssertionError unless ``found`` has ``dtype`` and is ``expected``, cut to it.

    The interpreter cuts bfloat16 off; a GPU rounds to nearest.
    """
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            compare(*case, dtype)
    assert mixture_kernels.gather_sum(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int64)).shape == (0, 8)
    assert mixture_kernels.swiglu(torch.empty(0, 8), torch.empty(0)).shape == (0, 4)
    print("equal")  # noqa: T201
