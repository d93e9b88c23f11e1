"""Checks of the devices that a benchmark needs."""

import sys


def need(device: str) -> None:
    """End the program with one line if GPUs were asked for and there are none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("error: no GPU here: give --device cpu and a small model\n")
        raise SystemExit(2)
