"""Sizes and checksums of a checkpoint's files, in ``checksums.json``.  Imports neither torch nor Megatron.

    {"schema": 1, "kind": "xxh3_64",
     "files": {"__0_0.distcp": {"bytes": 5120, "parts": [[0, 2048, "9c1e..."], [2048, 3072, "07aa..."]]}}}

A part is a tensor, or an object, of one rank: offset, length and checksum of its bytes in the file.  Ranks checksum
parts while they write them, and again right before they use them, so no file is read for its checksum alone.  Small
files have one part.  Checkpoints of earlier versions have no such file, and are read without checks.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
import xxhash

from asyncrl.errors import CheckpointFailed

CHECKSUMS_FILE = "checksums.json"
KIND = "xxh3_64"
"""The name of the checksum, which reaches the speed of memory.  It finds damage, not forgery."""
SHARD_SUFFIX = ".distcp"
"""The suffix of large files, which are checked in parts, by the ranks that read them."""

Part = tuple[int, int, str]
"""Offset and length in bytes, and the checksum in hexadecimal digits."""


def checksum() -> Any:
    """Return a new checksum with ``update`` and ``hexdigest``."""
    return xxhash.xxh3_64()


def write_checksums(folder: Path, parts: Mapping[str, Iterable[Part]]) -> None:
    """Write ``checksums.json`` for the files in ``folder``, of which ``parts`` has the shards, by name.

    Raises CheckpointFailed if a shard is not there, or has another size than its parts; or OSError.
    """
    files = {name: sorted(found) for name, found in parts.items()}
    for name, found in files.items():
        _check_size(folder, name, _end(found))
    for path in sorted(folder.iterdir()):
        if path.suffix != SHARD_SUFFIX and path.name != CHECKSUMS_FILE:
            content = path.read_bytes()
            files[path.name] = [(0, len(content), xxhash.xxh3_64_hexdigest(content))]
    listed = {name: {"bytes": _end(found), "parts": found} for name, found in sorted(files.items())}
    written = orjson.dumps({"schema": 1, "kind": KIND, "files": listed})
    (folder / CHECKSUMS_FILE).write_bytes(written)


def check_files(folder: Path) -> None:
    """Raise CheckpointFailed unless all files have their recorded sizes, and small files their checksums.

    Reads no shard.  A checkpoint without ``checksums.json`` passes.
    """
    for name, parts in _parts(folder).items():
        _check_size(folder, name, _end(parts))
        if not name.endswith(SHARD_SUFFIX):
            content = _read(folder / name)
            if xxhash.xxh3_64_hexdigest(content) != parts[0][2]:
                raise CheckpointFailed(f"{folder / name} was changed after it was written: its checksum differs")


class Checksums:
    """The recorded checksums of a checkpoint's parts, read at the first question."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int, int], str] | None = None

    def check(self, name: str, offset: int, length: int, found: str) -> None:
        """Raise CheckpointFailed if another checksum was recorded for this part; one without a record passes."""
        if self._known is None:
            files = _parts(self._folder)
            self._known = {(file, each[0], each[1]): each[2] for file, parts in files.items() for each in parts}
        if self._known.get((name, offset, length), found) != found:
            raise CheckpointFailed(
                f"{self._folder / name} is damaged: its {length:,} bytes from {offset:,} have another checksum than "
                "when they were written"
            )


def _parts(folder: Path) -> dict[str, list[Part]]:
    path = folder / CHECKSUMS_FILE
    if not path.exists():
        return {}
    try:
        found = orjson.loads(_read(path))
        if found["kind"] != KIND:
            return {}  # of a later version
        return {name: [(part[0], part[1], part[2]) for part in each["parts"]] for name, each in found["files"].items()}
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointFailed(f"{path} is torn or not a list of checksums: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointFailed(f"{path} cannot be read: {error.strerror}") from error


def _end(parts: list[Part]) -> int:
    return max((offset + length for offset, length, _ in parts), default=0)


def _check_size(folder: Path, name: str, expected: int) -> None:
    path = folder / name
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointFailed(f"{path} is missing: {expected:,} bytes of it were written") from None
    except OSError as error:
        raise CheckpointFailed(f"{path} cannot be read: {error.strerror}") from error
    if found != expected:
        raise CheckpointFailed(f"{path} is torn: it has {found:,} bytes of {expected:,}")
