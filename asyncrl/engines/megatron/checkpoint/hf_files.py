"""The files of a checkpoint in Hugging Face format: reads tensors by name, writes them in shards, one at a time."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from asyncrl.engines.megatron.checkpoint.writes import sync
from asyncrl.errors import ConfigError

SHARD_BYTES = 4 * 1024**3
"""The approximate size of one file of a saved checkpoint, in bytes, like transformers' default."""
ACCOMPANYING_FILES = ("generation_config.json", "*token*", "vocab*", "merges*", "*.model", "*.jinja", "*.py")
"""Files that a saved checkpoint copies from the one it started from, besides ``config.json``."""
HEADER_BYTES = 256 * 1024
"""Bytes reserved for the header at the start of a file, enough for about 1,900 tensors at 140 bytes each.  The header
is written last."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the dtypes that a saved checkpoint keeps.  FP8, for example, is not kept."""
_NAMES = {**{dtype: name for name, dtype in _DTYPES.items()}, torch.float8_e4m3fn: "F8_E4M3"}
"""safetensors' names of all dtypes that can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A written file without its final name, which depends on the number of files."""

    path: Path
    names: tuple[str, ...]
    """The names of its tensors."""
    num_bytes: int
    """The bytes of its tensors."""


def reader(checkpoint: Path, files: ExitStack, fp8_block: tuple[int, int] | None) -> Callable[[str], Tensor]:
    """Return a function that reads one tensor by name.  The function raises ConfigError, and so does this one.

    FP8 tensors are dequantized to float32.  The files close with ``files``.
    """
    holder = _open(checkpoint, files)

    def read(name: str) -> Tensor:
        if name not in holder:
            raise ConfigError(f"hf-checkpoint: no tensor {name} in {checkpoint}")
        tensor: Tensor = holder[name].get_tensor(name)
        scales = f"{name}_scale_inv"
        if fp8_block and scales in holder:
            return scaled(tensor.float(), holder[scales].get_tensor(scales), fp8_block)
        return tensor

    return read


def scaled(tensor: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of ``tensor`` (rows x columns) by its scale.  The last blocks may be smaller."""
    rows, columns = tensor.shape
    return tensor * scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def dtypes_of(checkpoint: Path) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor that is not quantized."""
    return {name: _DTYPES[dtype] for name, (dtype, _) in described(checkpoint).items() if dtype in _DTYPES}


def described(checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return safetensors' name of the dtype, and the shape, of every tensor.  Reads only the headers of the files."""
    with ExitStack() as files:
        slices = {name: file.get_slice(name) for name, file in _open(checkpoint, files).items()}
        return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def replace_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, changes: dict[str, Any]
) -> None:
    """Write a checkpoint with ``tensors`` and the other files of the checkpoint ``source``.

    ``changes`` are new values for keys of ``config.json``; None removes a key.  ``target`` appears, or is replaced,
    when it is complete: everything is written to a partial folder, which is then renamed.  At most one of ``tensors``
    is held at a time.
    """
    partial = begin_checkpoint(source, target, changes)
    finish_checkpoint(write_shards(tensors, partial), target)


def begin_checkpoint(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """Create the partial folder of ``target`` with everything but the weights, and return it.

    Deletes a partial folder that an earlier attempt left.
    """
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in ACCOMPANYING_FILES:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, partial / path.name)
    _copy_config(source, partial, changes)
    return partial


def partial_of(target: Path) -> Path:
    """Return the path of the partial folder, which becomes ``target`` when it is complete."""
    target = target.absolute()
    return target.with_name(target.name + ".partial")


def write_shards(
    tensors: Iterable[tuple[str, Tensor]],
    partial: Path,
    *,
    writer: int = 0,
    on_shard: Callable[[Shard], None] = lambda shard: None,
) -> list[Shard]:
    """Write ``tensors`` to files of about ``SHARD_BYTES``, and call ``on_shard`` with each complete file.

    ``writer`` is a number that differs between the processes that write to the same folder.
    """
    shards: list[Shard] = []
    open_file: _ShardFile | None = None

    def close(file: _ShardFile) -> None:
        shards.append(file.close())
        on_shard(shards[-1])

    with ExitStack() as files:
        for name, tensor in tensors:
            if open_file is not None and not open_file.has_room(name, tensor):
                close(open_file)
                open_file = None
            if open_file is None:
                path = partial / f"shard-{writer}-{len(shards)}.safetensors"
                open_file = files.enter_context(_ShardFile(path))
            open_file.add(name, tensor)
        if open_file is not None:
            close(open_file)
    return shards


def finish_checkpoint(shards: Sequence[Shard], target: Path) -> None:
    """Name the files of ``target``'s partial folder as transformers expects, then rename the folder to ``target``.

    Several files are numbered and get an index.
    """
    target, partial = target.absolute(), partial_of(target)
    _name_shards(shards, partial)
    for path in (*partial.iterdir(), partial):
        sync(path)
    if target.exists():
        outdated = target.with_name(target.name + ".outdated")
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        partial.rename(target)
        shutil.rmtree(outdated)
    else:
        partial.rename(target)
    sync(target.parent)


class _ShardFile:
    """One safetensors file: the length of the header, the header, and the tensors' bytes one after the other.

    Leaving the ``with`` block closes the file, complete or not.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.seek(HEADER_BYTES)
        self._path = path
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))
        self._num_bytes = 0

    def __enter__(self) -> "_ShardFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor fits into this file and its header."""
        return self._num_bytes < SHARD_BYTES and self._header_bytes + self._length(name, tensor) <= HEADER_BYTES - 8

    def add(self, name: str, tensor: Tensor) -> None:
        """Append the tensor's bytes and its entry in the header."""
        self._header_bytes += self._length(name, tensor)
        self._header[name] = self._described(tensor)
        numbers = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self._file.write(memoryview(numbers.numpy()))
        self._num_bytes += tensor.nbytes

    def close(self) -> Shard:
        """Write the header, padded with spaces as the format allows, and close the file."""
        header = json.dumps(self._header).encode().ljust(HEADER_BYTES - 8)
        with self._file as file:
            file.seek(0)
            file.write(len(header).to_bytes(8, "little") + header)
        names = tuple(name for name in self._header if name != "__metadata__")
        return Shard(path=self._path, names=names, num_bytes=self._num_bytes)

    def _length(self, name: str, tensor: Tensor) -> int:
        """Return the bytes of the tensor's entry in the header."""
        return len(json.dumps({name: self._described(tensor)}))

    def _described(self, tensor: Tensor) -> dict[str, Any]:
        place = [self._num_bytes, self._num_bytes + tensor.nbytes]
        return {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}


def _open(checkpoint: Path, files: ExitStack) -> dict[str, Any]:
    """Open all files and return the one that holds each tensor, by the tensor's name."""
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"hf-checkpoint: no safetensors in {checkpoint}")
    # With memory-mapped files, everything read from them would count as this process's memory.
    opened = [files.enter_context(safe_open(path, framework="pt", backend="pread")) for path in paths]
    return {name: file for file in opened for name in file.keys()}  # noqa: SIM118


def _copy_config(source: Path, folder: Path, changes: dict[str, Any]) -> None:
    text = (source / "config.json").read_text()
    config = json.loads(text)
    if any(config.get(key) != value for key, value in changes.items()):
        kept = {key: value for key, value in {**config, **changes}.items() if value is not None or key not in changes}
        text = json.dumps(kept, indent=2)
    (folder / "config.json").write_text(text)


def _name_shards(shards: Sequence[Shard], folder: Path) -> None:
    if len(shards) == 1:
        shards[0].path.rename(folder / "model.safetensors")
        return
    files = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        shard.path.rename(folder / file)
        files.update(dict.fromkeys(shard.names, file))
    index = {"metadata": {"total_size": sum(shard.num_bytes for shard in shards)}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
