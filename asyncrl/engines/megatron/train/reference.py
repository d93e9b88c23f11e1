"""A reference model that borrows the policy's device memory; its weights wait in host memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor


class ReferenceWeights:
    """A copy of the weights that ``model`` has at construction."""

    def __init__(self, model: Any) -> None:
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in _tensors(model)]

    @contextmanager
    def in_place(self, model: Any) -> Iterator[None]:
        """Give the model these weights inside the context, and restore its previous ones bit for bit afterwards.

        Costs three transfers of all weights between host and device, and a second copy in host memory meanwhile.
        """
        own = [tensor.detach().to("cpu", copy=True) for tensor in _tensors(model)]
        try:
            _copy(self._copies, model)
            yield
        finally:
            _copy(own, model)


@torch.no_grad()
def _copy(weights: list[Tensor], model: Any) -> None:
    for tensor, copy in zip(_tensors(model), weights, strict=True):
        tensor.copy_(copy)


def _tensors(model: Any) -> list[Tensor]:
    """List parameters, and buffers such as an expert's bias."""
    return list(chain(model.parameters(), model.buffers()))
