"""Tensors as views of one buffer of bytes, in which they are sent, and the buffer's checksum.

Used by the trainer and, inside SGLang, by the plug-ins.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_PIECE = 2**22
"""32-bit words that are multiplied at once.

Their 64-bit products take 32 MiB in addition to a bucket of any size.
"""


def views(flat: Tensor, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return views of the tensors that are stored one after another in ``flat``, a tensor of bytes.

    Raises RuntimeError if a tensor does not begin at a multiple of its element size.
    """
    found, start = [], 0
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype: torch.dtype = getattr(torch, name)
        stop = start + prod(shape) * dtype.itemsize
        found.append(flat[start:stop].view(dtype).view(*shape))
        start = stop
    return found


def checksum(flat: Tensor) -> Tensor:
    """Return an int64 scalar on the same device that changes, almost surely, with any byte of ``flat`` or their order.

    Each 32-bit word is multiplied by the odd number 2i + 1 of its place i in its piece, and the products are summed.
    Pieces are combined by Horner's rule.  All arithmetic is modulo 2^64.
    """
    whole = flat.numel() // 4 * 4
    return _checksum(flat[:whole].view(torch.int32), flat[whole:], _odd_numbers(whole // 4, flat.device))


def checksums(flats: Sequence[Tensor]) -> Tensor:
    """Return the checksum of each of ``flats``, at least one, as one tensor on their device.

    The host does not wait for the device.
    """
    odd = _odd_numbers(max(flat.numel() // 4 for flat in flats), flats[0].device)
    wholes = [flat.numel() // 4 * 4 for flat in flats]
    return torch.stack(
        [
            _checksum(flat[:whole].view(torch.int32), flat[whole:], odd)
            for flat, whole in zip(flats, wholes, strict=True)
        ]
    )


def _odd_numbers(num_words: int, device: torch.device) -> Tensor:
    """Return the first odd numbers, one per word of a piece, and at least four for the bytes after the last word."""
    return torch.arange(1, 2 * max(4, min(num_words, _PIECE)), 2, dtype=torch.int64, device=device)


def _checksum(words: Tensor, rest: Tensor, odd: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for piece in (*torch.split(words, _PIECE), rest):
        total = total * 1_000_003 + (piece * odd[: piece.numel()]).sum()
    return total
