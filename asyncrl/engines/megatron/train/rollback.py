"""Rollback of a training step of several optimizer updates when a later one fails."""

from typing import Any

import torch
from torch import Tensor


class RestorePoint:
    """A copy, in host memory, of a model's weights and of its (chained) optimizer."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._optimizers = [part.optimizer for part in optimizer.chained_optimizers]
        self._known = [set(part.state) for part in self._optimizers]
        tensors: list[Tensor] = list(model.parameters())
        for part in self._optimizers:
            for group in part.param_groups:
                tensors += group["params"]
            for state in part.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        self._steps = [(group, group.get("step")) for part in self._optimizers for group in part.param_groups]
        self._copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and optimizer to the copied state."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        for part, known in zip(self._optimizers, self._known, strict=True):
            for parameter in set(part.state) - known:  # Adam creates a parameter's state in its first update
                del part.state[parameter]
        for group, step in self._steps:  # TransformerEngine's Adam counts there; torch's, in each parameter's state
            if step is None:
                group.pop("step", None)
            else:
                group["step"] = step
