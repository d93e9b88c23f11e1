# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of a mixture of experts.  Import only where triton is installed; ``mixture_ops`` chooses.

Each program handles one row, and computes in float32.  Shape letters: T tokens, K experts of a token, N = T K rows sent
to experts, H hidden size, F an expert's FFN hidden size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_sum(y_ptr, place_ptr, out_ptr, H, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place_ptr + token * K + k).to(tl.int64)
        total += tl.load(y_ptr + row * H + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + column, total.to(out_ptr.dtype.element_ty), mask=column < H)


@triton.jit
def _swiglu(x_ptr, weight_ptr, out_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < F
    gate = tl.load(x_ptr + row * 2 * F + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=is_inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up * tl.load(weight_ptr + row)
    tl.store(out_ptr + row * F + column, product.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _swiglu_backward(x_ptr, weight_ptr, grad_ptr, x_grad_ptr, weight_grad_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < F
    gate = tl.load(x_ptr + row * 2 * F + column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * F + F + column, mask=is_inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * F + column, mask=is_inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(weight_grad_ptr + row, tl.sum(grad * silu * up, 0))
    gate_grad = grad * weight * up * (sigmoid * (1 + gate * (1 - sigmoid)))
    target = x_grad_ptr + row * 2 * F + column
    tl.store(target, gate_grad.to(x_grad_ptr.dtype.element_ty), mask=is_inside)
    tl.store(target + F, (grad * weight * silu).to(x_grad_ptr.dtype.element_ty), mask=is_inside)


def gather_sum(y_NH: Tensor, places_TK: Tensor) -> Tensor:
    """Return for each token the sum of the rows at its places."""
    y_NH, places_TK = y_NH.contiguous(), places_TK.contiguous()
    (num_tokens, k), hidden = places_TK.shape, y_NH.shape[1]
    out_TH = y_NH.new_empty(num_tokens, hidden)
    if num_tokens:
        _gather_sum[(num_tokens,)](y_NH, places_TK, out_TH, hidden, K=k, BLOCK=_block(hidden), num_warps=4)
    return out_TH


def swiglu(x_NF: Tensor, weights_N: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` times each row's weight; a row of ``x_NF`` has the gate and then the up projection."""
    x_NF, weights_N = x_NF.contiguous(), weights_N.contiguous()
    num_rows, size = x_NF.shape[0], x_NF.shape[1] // 2
    out_NF = x_NF.new_empty(num_rows, size)
    if num_rows:
        _swiglu[(num_rows,)](x_NF, weights_N, out_NF, size, BLOCK=_block(size), num_warps=4)
    return out_NF


def swiglu_backward(x_NF: Tensor, weights_N: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``x_NF`` and of ``weights_N``, which is float32."""
    x_NF, weights_N, grad_NF = x_NF.contiguous(), weights_N.contiguous(), grad_NF.contiguous()
    num_rows, size = grad_NF.shape
    x_grad_NF, weight_grad_N = torch.empty_like(x_NF), torch.empty_like(weights_N)
    if num_rows:
        _swiglu_backward[(num_rows,)](
            x_NF, weights_N, grad_NF, x_grad_NF, weight_grad_N, size, BLOCK=_block(size), num_warps=4
        )
    return x_grad_NF, weight_grad_N


def _block(size: int) -> int:
    block: int = triton.next_power_of_2(size)
    return block
