"""Weights in block FP8, for engines that serve them so.  Each block of a matrix has a separate scale.

DeepSeek-V3's format (its technical report, arXiv 2412.19437, section 3.3): a matrix is stored in E4M3.  A second
tensor, whose name ends in ``_scale_inv``, has one factor for each block of 128 x 128 elements.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.engines.megatron.checkpoint.hf_files import described
from asyncrl.errors import ConfigError
from asyncrl.models.shape import ModelShape

SCALES = "_scale_inv"
"""The suffix of the name of a tensor's scales."""
LARGEST = 448.0
"""The largest number in E4M3."""
_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
"""The dtypes of scales by safetensors' name: DeepSeek's and Qwen's."""
ALIGNMENT = 4
"""The alignment of tensors in a bucket, in bytes.  The tensor after a matrix may be float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFp8:
    """The FP8 tensors of a checkpoint, and their format."""

    block: tuple[int, int]
    """Rows and columns that share a scale."""
    scales: Mapping[str, torch.dtype]
    """The dtype of the scales of each FP8 tensor, by the tensor's name."""

    def stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the same weights as the checkpoint stores them.  Scales follow the tensor that they belong to."""
        for name, tensor in tensors:
            if name not in self.scales:
                yield name, tensor
                continue
            numbers, scales = quantised(tensor, self.block, self.scales[name])
            yield name, numbers
            yield name + SCALES, scales


def fp8_of(checkpoint: Path, shape: ModelShape) -> BlockFp8 | None:
    """Read from the files of ``checkpoint`` which tensors are quantized; None if none is.  Raises ConfigError."""
    if shape.fp8_block is None:
        return None
    stored = described(checkpoint)
    names = {name: sizes for name, (dtype, sizes) in stored.items() if dtype == "F8_E4M3"}
    scales = {name: _SCALE_DTYPES.get(stored.get(name + SCALES, ("none",))[0]) for name in names}
    if lacking := [name for name, dtype in scales.items() if dtype is None]:
        raise ConfigError(f"hf-checkpoint: {lacking[0]} in {checkpoint} is in fp8 and has no {SCALES} in F32 or BF16")
    odd = [name for name, sizes in names.items() if len(sizes) != 2 or sizes[0] * sizes[1] % ALIGNMENT]
    if odd:
        raise ConfigError(
            f"hf-checkpoint: cannot send {odd[0]} in fp8, it is {' x '.join(map(str, names[odd[0]]))}; only matrices "
            f"whose bytes are a multiple of {ALIGNMENT}"
        )
    return BlockFp8(block=shape.fp8_block, scales={name: dtype for name, dtype in scales.items() if dtype is not None})


def quantised(tensor: Tensor, block: tuple[int, int], scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize ``tensor`` (rows x columns) to E4M3 of the same shape, with one scale per block.

    The scale is the block's largest absolute value divided by 448, or 1 for a block of zeros.  The last blocks of a row
    or column may be smaller.
    """
    rows, columns = tensor.shape
    high, wide = block
    missing = (0, -columns % wide, 0, -rows % high)
    whole = pad(tensor.float(), missing) if any(missing) else tensor.float()
    blocks = whole.view(whole.shape[0] // high, high, whole.shape[1] // wide, wide)
    scales = (blocks.abs().amax(dim=(1, 3)) / LARGEST).to(scale_dtype)
    scales = torch.where(scales == 0, 1, scales)
    # Scales below 1e-38 have few digits.  A scale that was rounded down takes the block's largest element above 448,
    # which would become NaN without the clamp.
    numbers = (blocks / scales.float()[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.view(whole.shape)[:rows, :columns].contiguous(), scales
