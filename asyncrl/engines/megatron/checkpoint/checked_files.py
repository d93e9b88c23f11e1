"""Shards with checksums, on top of torch's reader and writer of files: each part is checked as it passes by.

    write: torch.save ──▶ _SummedStream: checksum ──▶ file         read: file ──▶ checksum ──▶ compare ──▶ torch.load

Megatron makes its own reader of files, so importing this module replaces the class that Megatron takes for it.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as megatron_files
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from asyncrl.engines.megatron.checkpoint.checksums import Checksums, Part, checksum
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.dist_checkpointing.strategies.torch._get_filesystem_reader",
        parameters=("checkpoint_dir", "cache_metadata"),
        attributes=("FileSystemReader",),
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem.FileSystemReader._slice_file",
        parameters=("self", "file", "sinfo"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem._StorageWriterTransforms.transform_save_stream",
        parameters=("self", "write_item", "raw_stream"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="torch.distributed.checkpoint.filesystem._StorageInfo",
        parameters=("relative_path", "offset", "length"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""

_BLOCK_BYTES = 16 * 1024**2
"""Bytes read at once for a checksum.  They stay in the page cache for torch, which reads them right after."""


class SummingTransforms:
    """Stands in for torch's transforms of a writer: changes nothing, and takes the checksum of every part."""

    def __init__(self) -> None:
        self._streams: list[_SummedStream] = []

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[Any, list[str]]:
        """Return the stream for one part.  The empty list says that its bytes are as without transforms."""
        self._streams.append(_SummedStream(raw_stream))
        return self._streams[-1], []

    def parts(self, results: list[WriteResult]) -> Iterator[tuple[str, Part]]:
        """Yield the file and the checksum of each written part.  ``results`` are in the order of the writes."""
        for result, stream in zip(results, self._streams, strict=True):
            place: _StorageInfo = result.storage_data
            yield place.relative_path, (place.offset, place.length, stream.checksum.hexdigest())


class _SummedStream(io.RawIOBase):
    """A stream that writes to another one, which it does not close."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.checksum = checksum()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.checksum.update(content)
        written: int = self._target.write(content)
        return written

    def close(self) -> None:
        if not self.closed:
            self._target.flush()
        super().close()


class CheckedReader(FileSystemReader):
    """torch's reader, which compares the checksum of each part before it is used.  Raises CheckpointFailed then."""

    def __init__(self, path: Any, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        self._checksums = Checksums(Path(path))

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        found, left = checksum(), sinfo.length
        file.seek(sinfo.offset)
        while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
            found.update(block)
            left -= len(block)
        self._checksums.check(sinfo.relative_path, sinfo.offset, sinfo.length, found.hexdigest())
        return super()._slice_file(file, sinfo)


megatron_files.FileSystemReader = CheckedReader
