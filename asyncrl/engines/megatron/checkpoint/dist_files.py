"""The files of a torch_dist checkpoint.  Reading and writing each hold at most one tensor at a time.

Megatron writes such files with torch.distributed.checkpoint, whose writer holds all tensors of a file until it is
complete.
"""

import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from math import prod
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from asyncrl.engines.megatron.checkpoint.checked_files import CheckedReader
from asyncrl.errors import CheckpointFailed
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.dist_checkpointing.mapping.ShardedTensor",
        attributes=("key", "data", "local_shape", "global_shape", "global_offset", "prepend_axis_num"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.mapping.ShardedObject",
        attributes=("unique_key", "data"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed._shard._utils.narrow_tensor_by_index",
        parameters=("tensor", "offsets", "sizes"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem._StorageInfo",
        parameters=("relative_path", "offset", "length"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem.FileSystemWriter.finish",
        parameters=("self", "metadata", "results"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem.FileSystemReader.set_up_storage_reader",
        parameters=("self", "metadata", "is_coordinator"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem.FileSystemReader.read_data",
        parameters=("self", "plan", "planner"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.resolve_tensor",
        parameters=("self", "read_item"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.planner_helpers.create_read_items_for_chunk_list",
        parameters=("fqn", "checkpoint_md", "local_chunks"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.planner.ReadItem", attributes=("dest_offsets", "lengths"), used_in=__name__
    ),
    Internal(
        name="torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        keywords=("properties", "size", "chunks"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        keywords=("offsets", "sizes"),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.metadata.MetadataIndex", parameters=("fqn", "offset"), used_in=__name__
    ),
    Internal(
        name="torch.distributed.checkpoint.metadata.Metadata", keywords=("state_dict_metadata",), used_in=__name__
    ),
    Internal(
        name="torch.distributed.checkpoint.storage.WriteResult",
        keywords=("index", "size_in_bytes", "storage_data"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

FILE_BYTES = 4 * 1024**3
"""The approximate size of one file, in bytes, as in a saved Hugging Face folder.  A file has whole parts of weights."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One written part of a tensor, or one object, with its place in the files."""

    result: WriteResult
    tensor: TensorStorageMetadata | None
    """The metadata of the whole tensor, with this part as the only chunk; None for an object."""


class DistWriter:
    """A writer of one process's part of a checkpoint.  Close it, then pass ``written`` of all processes to ``finish``.

    Leaving the ``with`` block closes the last file, even an incomplete one.
    """

    def __init__(self, folder: Path, writer: int, on_file: Callable[[Path, int], None]) -> None:
        """Open the first file.

        ``writer`` is a number that differs between processes.  ``on_file`` is called with each complete file and its
        size in bytes.
        """
        self._folder, self._writer, self._on_file = folder, writer, on_file
        self._num_files = 0
        self._file = self._next_file()
        self.written: list[Written] = []

    def __enter__(self) -> "DistWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, part: ShardedTensor) -> None:
        """Write the data of one part of a tensor."""
        numbers, offsets, sizes = part.data.detach(), *_place(part)
        if numbers.untyped_storage().nbytes() != numbers.nbytes:
            numbers = numbers.clone()  # torch.save writes the whole storage
        tensor = TensorStorageMetadata(
            properties=TensorProperties(dtype=numbers.dtype),
            size=torch.Size(part.global_shape),
            chunks=[ChunkStorageMetadata(offsets=offsets, sizes=sizes)],
        )
        self._write(numbers.view(sizes), MetadataIndex(part.key, offsets), tensor)

    def add_object(self, each: ShardedObject) -> None:
        """Write an object that is not a tensor as Megatron does: as a list with one element."""
        self._write([each.data], MetadataIndex(each.unique_key), None)

    def close(self) -> None:
        """Complete the last file and flush it to the disk."""
        with self._file as file:
            num_bytes = file.tell()
            file.flush()
            os.fsync(file.fileno())
        self._on_file(Path(file.name), num_bytes)

    def _write(self, content: object, index: MetadataIndex, tensor: TensorStorageMetadata | None) -> None:
        if self._file.tell() >= FILE_BYTES:
            self.close()
            self._file = self._next_file()
        start = self._file.tell()
        torch.save(content, self._file)
        length = self._file.tell() - start
        place = _StorageInfo(Path(self._file.name).name, start, length)
        result = WriteResult(index=index, size_in_bytes=length, storage_data=place)
        self.written.append(Written(result=result, tensor=tensor))

    def _next_file(self) -> BufferedWriter:
        self._num_files += 1
        return (self._folder / f"__{self._writer}_{self._num_files - 1}.distcp").open("wb")


def finish(folder: Path, written: Iterable[Written]) -> None:
    """Write the metadata of the checkpoint, which makes it complete."""
    everything = list(written)
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for each in everything:
        name, tensor = each.result.index.fqn, each.tensor
        if tensor is None:
            described[name] = BytesStorageMetadata()
        elif isinstance(known := described.setdefault(name, tensor), TensorStorageMetadata) and known is not tensor:
            known.chunks.extend(tensor.chunks)
    writer = FileSystemWriter(folder)
    writer.finish(Metadata(state_dict_metadata=described), [[each.result for each in everything]])
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


class DistReader:
    """A reader of tensor parts, whatever layout wrote the checkpoint.  All methods raise CheckpointFailed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = CheckedReader(folder)
        with self._reading():
            metadata = self._files.read_metadata()
            self._files.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = {
            key: found
            for key, found in metadata.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }

    def size(self, part: ShardedTensor) -> torch.Size:
        """The checkpoint's size of the whole tensor that ``part`` belongs to."""
        key, offsets, _ = self._place(part)
        return self._tensors[key].size[len(offsets) - len(part.global_shape) :]

    def read(self, part: ShardedTensor) -> Tensor:
        """Read the data of ``part`` in the checkpoint's dtype."""
        key, offsets, sizes = self._place(part)
        tensor = self._tensors[key]
        wanted = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        items = create_read_items_for_chunk_list(key, tensor, [wanted])
        if sum(prod(item.lengths) for item in items) != prod(sizes):
            raise CheckpointFailed(
                f"{self._folder} cannot be loaded: {key}, {list(tensor.size)}, does not cover the part that is needed"
            )
        numbers = torch.empty(sizes, dtype=tensor.properties.dtype)
        with self._reading():
            self._files.read_data(LoadPlan(items), _Into(numbers))
        return numbers.view(part.local_shape)

    def unread(self, parts: Sequence[ShardedTensor]) -> list[str]:
        """The keys of the policy's weights in the checkpoint to which none of ``parts`` belongs."""
        known = {self._place(part)[0] for part in parts}
        ours = ("embedding.", "decoder.", "output_layer.")  # other keys begin with a prefix of the optimizer or critic
        return [key for key in self._tensors if key.startswith(ours) and key not in known]

    def _place(self, part: ShardedTensor) -> tuple[str, torch.Size, torch.Size]:
        """Find the key, offsets and sizes of ``part``.

        A checkpoint has a tensor for each layer, or one tensor for all layers, whose first dimension is the layer.
        """
        offsets, sizes = _place(part)
        if part.key in self._tensors:
            return part.key, offsets, sizes
        together, found = _LAYER.sub("", part.key), _LAYER.search(part.key)
        if found and together in self._tensors:
            return together, torch.Size((int(found[1]), *offsets)), torch.Size((1, *sizes))
        raise CheckpointFailed(f"{self._folder} cannot be loaded: it has no {part.key}")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, RuntimeError, AttributeError, KeyError, pickle.UnpicklingError) as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointFailed(f"{self._folder} cannot be loaded: {line}") from error


class _Into(DefaultLoadPlanner):
    """A load planner that reads everything into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)


def _place(part: ShardedTensor) -> tuple[torch.Size, torch.Size]:
    """Return offsets and sizes of ``part`` in the whole tensor.

    The whole tensor may have further dimensions, for example one with an index for each expert.
    """
    return torch.Size(part.global_offset), torch.Size((1,) * part.prepend_axis_num + tuple(part.local_shape))
