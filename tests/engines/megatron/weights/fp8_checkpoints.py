"""Tiny checkpoints in fp8, and the values of their numbers, in plain numpy."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
BLOCK = (16, 12)
"""Rows and columns of a block, which divide the sizes of the tiny models only by chance."""
IN_FULL = ("embed_tokens", "lm_head", "norm", "mlp.gate.", ".bias")
"""Parts of the names of modules that DeepSeek and Qwen leave out of fp8."""
ONE_MORE = (*IN_FULL, "layers.0.self_attn.o_proj")
"""The same with one more module that the checkpoint's maker left out."""


def by_blocks(matrix: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Divide each block by its scale; the scaled numbers before rounding to E4M3, and the scales."""
    rows, columns = matrix.shape
    scales = np.ones((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    scaled = np.zeros_like(matrix)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            largest = np.abs(matrix[place]).max()
            if largest > 0:
                scales[i, j] = largest / np.float32(448)
            scaled[place] = matrix[place] / scales[i, j]
    return scaled, scales


def meant(numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The values of fp8 numbers: each times the scale of its block."""
    found = numbers.float().clone()
    for i, j in np.ndindex(*scales.shape):
        found[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= scales[i, j].float()
    return found


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def in_fp8(
    checkpoint: Path,
    *,
    scale_dtype: torch.dtype = torch.float32,
    block: tuple[int, int] = BLOCK,
    in_full: tuple[str, ...] = ONE_MORE,
) -> Path:
    """Convert the matrices of the checkpoint's layers, and no others, to fp8 in place."""
    tensors = {}
    for name, tensor in tensors_of(checkpoint).items():
        if tensor.ndim != 2 or any(part in name for part in in_full):
            tensors[name] = tensor.float() if name.endswith("correction_bias") else tensor  # as DeepSeek's are
            continue
        scaled, scales = by_blocks(tensor.float().numpy(), block)
        tensors[name] = torch.from_numpy(scaled).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.from_numpy(scales).to(scale_dtype)
    (path,) = checkpoint.glob("*.safetensors")
    save_file(tensors, path)
    config = json.loads((checkpoint / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    (checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    return checkpoint
