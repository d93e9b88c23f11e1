# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of the log-prob head: one reads a row of logits once, one replaces it by its gradient.

Rows are logits of one token, in bfloat16 or float16, contiguous.  All sums are in float32.
Shape letters: R tokens, V this rank's part of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Logits at a time; 8 warps read 16 bytes per thread."""
_WARPS = 8


def row_sums(logits_RV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit of each row, and the sums of exp(logit - largest), alone and times the logit.

    Logits are divided by ``temperature``.  Online softmax: Milakov and Gimelshein (arXiv 1805.02867), algorithm 3.
    """
    num_rows = len(logits_RV)
    found = torch.empty(3, num_rows, device=logits_RV.device, dtype=torch.float32)
    if num_rows:
        _launch(_row_sums, (num_rows,), logits_RV, found, num_rows, logits_RV.shape[1], 1 / temperature)
    largest_R, total_R, weighted_R = found
    return largest_R, total_R, weighted_R


def slopes(logits_RV: Tensor, local_R: Tensor, columns: Sequence[Tensor], temperature: float) -> Tensor:
    """Replace each logit by ``(p (factor - g_H (log p + H)) + 1[target] g) / temperature``, and return the tensor.

    ``columns`` are the log of the sum of exponentials, the entropy H, the factor, g and g_H of each token.  ``local_R``
    are the targets among this rank's ids; they may be outside.
    """
    num_rows, size = logits_RV.shape
    numbers = torch.stack([each.float() for each in columns])
    if num_rows:
        grid = (num_rows, triton.cdiv(size, _BLOCK))
        _launch(_slopes, grid, logits_RV, local_R.contiguous(), numbers, num_rows, size, 1 / temperature)
    return logits_RV


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
    kernel[grid](*args, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def _row_sums(x_ptr, found_ptr, num_rows, size, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * size
    largest = float("-inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32) * scale
        new = tl.maximum(largest, tl.max(x, 0))
        exp = tl.exp(x - new)
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(exp, 0)
        weighted = weighted * shrink + tl.sum(exp * tl.where(column < size, x, 0.0), 0)
        largest = new
    tl.store(found_ptr + row, largest)
    tl.store(found_ptr + num_rows + row, total)
    tl.store(found_ptr + 2 * num_rows + row, weighted)


@triton.jit
def _slopes(x_ptr, target_ptr, numbers_ptr, num_rows, size, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += row * size
    numbers_ptr += row
    x = tl.load(x_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32) * scale
    log_p = x - tl.load(numbers_ptr)
    factor = tl.load(numbers_ptr + 2 * num_rows)
    for_entropy = tl.load(numbers_ptr + 4 * num_rows)
    shifted = tl.where(column < size, log_p, 0.0) + tl.load(numbers_ptr + num_rows)
    slope = tl.exp(log_p) * (factor - for_entropy * shifted)
    slope += tl.where(column == tl.load(target_ptr + row), tl.load(numbers_ptr + 3 * num_rows), 0.0)
    tl.store(x_ptr + column, (slope * scale).to(x_ptr.dtype.element_ty), mask=column < size)
