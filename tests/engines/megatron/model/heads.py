"""The log-prob head against torch's autograd over all logits at once.

    python -m tests.engines.megatron.model.heads

prints the differences of the Triton kernels as JSON.  They run in Triton's interpreter if TRITON_INTERPRET is 1.
"""

import json
import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.fast_step.head import plain_logprobs
    from asyncrl.engines.megatron.model.logprobs import FurtherIds, TokenLogprobs, over_kept_ids, token_logprobs

TEMPERATURE = 0.7
COUNTS = np.array([3, 0, 1, 5, 0, 0, 2, 2, 2, 4, 0, 7, 1], np.int32)


def inputs(vocabulary: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, FurtherIds]:
    """Hidden states, an output matrix, targets, and sets of ids that hold the targets; some sets are empty."""
    torch.manual_seed(0)
    hidden = torch.randn(len(COUNTS), 16).to(device, dtype).requires_grad_()
    weight = (0.4 * torch.randn(vocabulary, 16)).to(device, dtype).requires_grad_()
    targets = torch.randint(vocabulary, (len(COUNTS),))
    ids = []
    for target, count in zip(targets.tolist(), COUNTS, strict=True):
        others = torch.randperm(vocabulary)
        ids.append(torch.cat([torch.tensor([target]), others[others != target]])[:count])
    return hidden, weight, targets.to(device), FurtherIds(counts_R=COUNTS, ids_N=torch.cat(ids).to(device))


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, further: FurtherIds) -> TokenLogprobs:
    """The same results in float64."""
    logits = hidden.double() @ weight.double().t() / TEMPERATURE
    return plain_logprobs(logits, targets, further)


def results(found: TokenLogprobs, further: FurtherIds) -> tuple[Tensor, ...]:
    """Everything that has a gradient."""
    assert found.further_N is not None
    return found.logprobs_R, found.entropies_R, found.further_N, *over_kept_ids(found, found.further_N, further.rows_N)


def differences(vocabulary: int, dtype: torch.dtype, device: str, *, is_fused: bool | None) -> tuple[float, float]:
    """The largest difference of any result, and the largest relative one of the norms of gradients."""
    hidden, weight, targets, further = inputs(vocabulary, dtype, device)
    found = token_logprobs(
        hidden, weight, targets, TEMPERATURE, entropy_gradient=True, further=further, is_fused=is_fused
    )
    got, wanted = results(found, further), results(plain(hidden, weight, targets, further), further)
    factors = [torch.randn_like(each) for each in wanted]
    slopes = [
        torch.autograd.grad([(each * by).sum() for each, by in zip(side, factors, strict=True)], (hidden, weight))
        for side in (got, wanted)
    ]
    apart = max(float((one - other).detach().abs().max()) for one, other in zip(got, wanted, strict=True))
    relative = [
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(*slopes, strict=True)
    ]
    return apart, max(relative) if all(map(math.isfinite, relative)) else math.inf


def fused() -> dict[str, Any]:
    """The differences of the kernels on the CPU, for rows of less than one block and of more."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        f"{size} {name}": differences(size, dtype, "cpu", is_fused=True)
        for size in (50, 5000)
        for name, dtype in dtypes.items()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fused()))
