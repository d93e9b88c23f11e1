"""The operations of an optimizer update, on float32 numbers, against torch's in float64."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from asyncrl.config.areas import TrainConfig
from asyncrl.engines.megatron.fast_step.differences import Difference, limit_of, relative, worst
from asyncrl.engines.megatron.setup.gradient_norm import l2_norm

Norm = Callable[[Sequence[Tensor]], Tensor]
MakeAdam = Callable[[Sequence[torch.nn.Parameter], TrainConfig], torch.optim.Optimizer]

_SHAPES = ((3, 5), (7,), (), (2, 3, 4), (0, 4), (100, 333))
_LEARNING_RATE, _NUM_STEPS = 1e-2, 3
_WEIGHT_SIZE = 0.02
"""Standard deviation of the weights.  Float32 rounds them by 1e-9, which is little in steps of the learning rate."""


def foreach_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Compute the norm of all gradients together as Megatron asks for it."""
    flag = torch.zeros(1, dtype=torch.int, device=gradients[0].device)
    return l2_norm(0, flag, [gradients], False)[0]


def compare_norm(device: torch.device, norm: Norm) -> Difference:
    """Compare the norm of gradients of two dtypes."""
    gradients = [each.to(dtype) for dtype in (torch.float32, torch.bfloat16) for each in _drawn(device, 50)]
    exact = torch.cat([each.double().flatten() for each in gradients]).norm().view(1)
    return Difference(what="norm", value=relative(norm(gradients), exact), limit=limit_of(torch.float32))


def fused_adam(parameters: Sequence[torch.nn.Parameter], train: TrainConfig) -> torch.optim.Optimizer:
    """Make the AdamW that ``fuse`` makes of Megatron's."""
    return _adam(parameters, train, is_fused=True)


def compare_adam(device: torch.device, train: TrainConfig, make: MakeAdam) -> Difference:
    """Compare how far a few updates move the weights."""
    start = [_WEIGHT_SIZE * each for each in _drawn(device, 60)]
    found = _moved(make, start, train)
    exact = _moved(lambda parameters, _: _adam(parameters, train, is_fused=False), [x.double() for x in start], train)
    return worst(found, exact, limit_of(torch.float32))


def _adam(parameters: Sequence[torch.nn.Parameter], train: TrainConfig, *, is_fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=_LEARNING_RATE,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        fused=is_fused,
        foreach=False,
    )


def _moved(make: MakeAdam, start: Sequence[Tensor], train: TrainConfig) -> dict[str, Tensor]:
    parameters = [torch.nn.Parameter(each.clone()) for each in start]
    adam = make(parameters, train)
    for step in range(_NUM_STEPS):
        gradients = _drawn(start[0].device, 70 + step)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        adam.step()
    moved = [(after.detach() - before).flatten() for after, before in zip(parameters, start, strict=True)]
    return {"change of the weights": torch.cat(moved)}


def _drawn(device: torch.device, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in _SHAPES]
