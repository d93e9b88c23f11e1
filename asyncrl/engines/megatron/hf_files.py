"""The files of a checkpoint in Hugging Face format: tensors in by name, tensors out in shards."""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import ConfigError

SHARD_BYTES = 4 * 1024**3
"""Of one file of a saved checkpoint, like transformers' default."""
BESIDE_THE_WEIGHTS = ("generation_config.json", "*token*", "vocab*", "merges*", "*.model", "*.jinja", "*.py")
"""Files that a saved checkpoint takes from the one it started from, besides ``config.json``."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the dtypes that are kept in a saved checkpoint; fp8, say, is not."""


def reader(checkpoint: Path, files: ExitStack, fp8_block: tuple[int, int] | None) -> Callable[[str], Tensor]:
    """Reads one tensor at a time; the files close with ``files``.  Raises ConfigError, also when reading.

    Tensors in fp8 come as the float32 numbers that they stand for.
    """
    holder = _open(checkpoint, files)

    def read(name: str) -> Tensor:
        if name not in holder:
            raise ConfigError(f"hf-checkpoint: no tensor {name} in {checkpoint}")
        tensor: Tensor = holder[name].get_tensor(name)
        scales = f"{name}_scale_inv"
        if fp8_block and scales in holder:
            return _scaled(tensor.float(), holder[scales].get_tensor(scales), fp8_block)
        return tensor

    return read


def dtypes_of(checkpoint: Path) -> dict[str, torch.dtype]:
    """Of every tensor that is not quantised; reads the files' headers only."""
    with ExitStack() as files:
        found = {name: file.get_slice(name).get_dtype() for name, file in _open(checkpoint, files).items()}
    return {name: _DTYPES[dtype] for name, dtype in found.items() if dtype in _DTYPES}


def replace_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, changes: dict[str, Any]
) -> None:
    """Write ``tensors`` and what else belongs to the checkpoint in ``source``.

    ``changes`` are keys of ``config.json``, None for one that is left out.  ``target`` appears, or changes, when it is
    complete: everything is written beside it and renamed.
    """
    target = target.absolute()
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in BESIDE_THE_WEIGHTS:
        for path in source.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    _copy_config(source, partial, changes)
    _write_shards(tensors, partial)
    if target.exists():
        outdated = target.with_name(target.name + ".outdated")
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        partial.rename(target)
        shutil.rmtree(outdated)
    else:
        partial.rename(target)


def _open(checkpoint: Path, files: ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor."""
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"hf-checkpoint: no safetensors in {checkpoint}")
    opened = [files.enter_context(safe_open(path, framework="pt")) for path in paths]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _scaled(tensor: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each block of ``tensor`` times its scale; the last blocks may be smaller."""
    rows, columns = tensor.shape
    return tensor * scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def _copy_config(source: Path, folder: Path, changes: dict[str, Any]) -> None:
    text = (source / "config.json").read_text()
    config = json.loads(text)
    if any(config.get(key) != value for key, value in changes.items()):
        kept = {key: value for key, value in {**config, **changes}.items() if value is not None or key not in changes}
        text = json.dumps(kept, indent=2)
    (folder / "config.json").write_text(text)


def _write_shards(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """One file when everything fits, else numbered files and the index that transformers looks for."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"shard-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        held[name] = tensor.to("cpu").contiguous().clone()
        total += held[name].nbytes
        if sum(kept.nbytes for kept in held.values()) >= SHARD_BYTES:
            flush()
    if held:
        flush()
    _name_shards(shards, total, folder)


def _name_shards(shards: list[list[str]], total_bytes: int, folder: Path) -> None:
    if len(shards) == 1:
        (folder / "shard-0.safetensors").rename(folder / "model.safetensors")
        return
    files = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"shard-{number}.safetensors").rename(folder / file)
        files.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
