"""Tensors as one buffer of bytes, which is how they travel, and its checksum.  For both ends: trainer and engines."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_PIECE = 2**22
"""Words that are multiplied at once: 32 MiB of 64-bit products beside a bucket of any size."""


def views(flat: Tensor, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors that lie one behind the other in ``flat``, bytes: parts of it, no copies.

    Raises RuntimeError where one does not begin at a multiple of its element's size.
    """
    found, start = [], 0
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype: torch.dtype = getattr(torch, name)
        stop = start + prod(shape) * dtype.itemsize
        found.append(flat[start:stop].view(dtype).view(*shape))
        start = stop
    return found


def checksum(flat: Tensor) -> Tensor:
    """One int64 on the same device that changes, almost surely, with any byte of ``flat`` and with their order.

    The bytes as 32-bit words, each times its odd number in its piece, pieces by Horner's rule, all modulo 2^64.
    """
    whole = flat.numel() // 4 * 4
    return _checksum(flat[:whole].view(torch.int32), flat[whole:], _odd_numbers(whole // 4, flat.device))


def checksums(flats: Sequence[Tensor]) -> Tensor:
    """The checksum of each, at least one, in one tensor on their device.  The host waits for nothing."""
    odd = _odd_numbers(max(flat.numel() // 4 for flat in flats), flats[0].device)
    wholes = [flat.numel() // 4 * 4 for flat in flats]
    return torch.stack(
        [
            _checksum(flat[:whole].view(torch.int32), flat[whole:], odd)
            for flat, whole in zip(flats, wholes, strict=True)
        ]
    )


def _odd_numbers(num_words: int, device: torch.device) -> Tensor:
    """The first ones, as many as a piece has words; four at least, for the bytes behind the last word."""
    return torch.arange(1, 2 * max(4, min(num_words, _PIECE)), 2, dtype=torch.int64, device=device)


def _checksum(words: Tensor, rest: Tensor, odd: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in (*torch.split(words, _PIECE), rest):
        total = total * 1_000_003 + (piece * odd[: piece.numel()]).sum()
    return total
