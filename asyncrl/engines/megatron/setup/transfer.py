"""Copies of host arrays to the device of training."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on ``device``.

    The copy to a GPU goes through page-locked memory, so that the host does not wait until the GPU has done all work
    before the copy.  On a CPU the tensor shares the array's memory.
    """
    found = torch.from_numpy(values)
    if device.type != "cuda":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
