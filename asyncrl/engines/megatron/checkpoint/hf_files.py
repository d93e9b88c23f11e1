"""The files of a checkpoint in Hugging Face format: tensors in by name, tensors out in shards, one at a time."""

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

from asyncrl.engines.megatron.checkpoint.directory import sync
from asyncrl.errors import ConfigError

SHARD_BYTES = 4 * 1024**3
"""Of one file of a saved checkpoint, like transformers' default."""
BESIDE_THE_WEIGHTS = ("generation_config.json", "*token*", "vocab*", "merges*", "*.model", "*.jinja", "*.py")
"""Files that a saved checkpoint takes from the one it started from, besides ``config.json``."""
HEADER_BYTES = 256 * 1024
"""Room for the description at the beginning of a file, which is written last; about 1,900 tensors at 140 bytes each."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the dtypes that are kept in a saved checkpoint; fp8, say, is not."""
_NAMES = {**{dtype: name for name, dtype in _DTYPES.items()}, torch.float8_e4m3fn: "F8_E4M3"}
"""Of all that can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A written file that has no final name yet, since nobody knows how many there will be."""

    path: Path
    names: tuple[str, ...]
    """Of its tensors."""
    num_bytes: int
    """Of its tensors."""


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
            return scaled(tensor.float(), holder[scales].get_tensor(scales), fp8_block)
        return tensor

    return read


def scaled(tensor: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each block of ``tensor`` times its scale; the last blocks may be smaller."""
    rows, columns = tensor.shape
    return tensor * scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def dtypes_of(checkpoint: Path) -> dict[str, torch.dtype]:
    """Of every tensor that is not quantised."""
    return {name: _DTYPES[dtype] for name, (dtype, _) in described(checkpoint).items() if dtype in _DTYPES}


def described(checkpoint: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """safetensors' name of the dtype, and the sizes, of every tensor; reads the files' headers only."""
    with ExitStack() as files:
        slices = {name: file.get_slice(name) for name, file in _open(checkpoint, files).items()}
        return {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


def replace_checkpoint(
    tensors: Iterable[tuple[str, Tensor]], source: Path, target: Path, changes: dict[str, Any]
) -> None:
    """Write ``tensors`` and what else belongs to the checkpoint in ``source``.

    ``changes`` are keys of ``config.json``, None for one that is left out.  ``target`` appears, or changes, when it is
    complete: everything is written beside it and renamed.  No more than one of ``tensors`` is held at a time.
    """
    partial = begin_checkpoint(source, target, changes)
    finish_checkpoint(write_shards(tensors, partial), target)


def begin_checkpoint(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """A folder beside ``target`` with everything but the weights; what an earlier attempt left there goes."""
    partial = partial_of(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in BESIDE_THE_WEIGHTS:
        for path in source.glob(pattern):
            shutil.copyfile(path, partial / path.name)
    _copy_config(source, partial, changes)
    return partial


def partial_of(target: Path) -> Path:
    """The folder that is ``target`` while it is being written."""
    target = target.absolute()
    return target.with_name(target.name + ".partial")


def write_shards(
    tensors: Iterable[tuple[str, Tensor]],
    partial: Path,
    *,
    writer: int = 0,
    on_shard: Callable[[Shard], None] = lambda shard: None,
) -> list[Shard]:
    """Write ``tensors`` to files of about ``SHARD_BYTES``; ``on_shard`` hears of each that is complete.

    ``writer`` tells several processes apart that write to the same folder.
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
    """Name the files of ``target``'s partial folder, one or numbered with the index that transformers looks for."""
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
    """One file of safetensors: a length, a description of that length, and the tensors' bytes one after the other.

    ``with`` closes it, complete or not.
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
        """Whether the tensor can be added."""
        return self._num_bytes < SHARD_BYTES and self._header_bytes + self._length(name, tensor) <= HEADER_BYTES - 8

    def add(self, name: str, tensor: Tensor) -> None:
        """Write it."""
        self._header_bytes += self._length(name, tensor)
        self._header[name] = self._described(tensor)
        numbers = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        self._file.write(memoryview(numbers.numpy()))
        self._num_bytes += tensor.nbytes

    def close(self) -> Shard:
        """Write the description, filled up with spaces as the format allows."""
        header = json.dumps(self._header).encode().ljust(HEADER_BYTES - 8)
        with self._file as file:
            file.seek(0)
            file.write(len(header).to_bytes(8, "little") + header)
        names = tuple(name for name in self._header if name != "__metadata__")
        return Shard(path=self._path, names=names, num_bytes=self._num_bytes)

    def _length(self, name: str, tensor: Tensor) -> int:
        """Of the tensor's part of the description."""
        return len(json.dumps({name: self._described(tensor)}))

    def _described(self, tensor: Tensor) -> dict[str, Any]:
        place = [self._num_bytes, self._num_bytes + tensor.nbytes]
        return {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}


def _open(checkpoint: Path, files: ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor."""
    paths = sorted(checkpoint.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"hf-checkpoint: no safetensors in {checkpoint}")
    # Mapped files would count as this process's memory, all that was read of them.
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
