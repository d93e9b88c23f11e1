"""A batch in a file, exactly: every number, every column and every metadata value that is plain.

Batch ──▶ plain values ──▶ msgpack ──▶ zstd ──▶ file        reading executes nothing that is in the file
"""

from array import array
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from asyncrl.errors import DataError
from asyncrl.rollout_log.whole_file import write_whole
from asyncrl.token_columns import Routes, TokenSets
from asyncrl.types import (
    Batch,
    FinishReason,
    Prompt,
    Sample,
    ScoredGroup,
    ScoredSample,
    Span,
    Turn,
    Weights,
)

_KIND = "__kind__"
"""Key of the mappings that stand for anything but a number, a text or a list; users' mappings are among these."""
_CLASSES = {
    kind.__name__: kind
    for kind in (Batch, Prompt, Routes, Sample, ScoredGroup, ScoredSample, Span, TokenSets, Turn, Weights)
}


def write_batch(path: Path, batch: Batch) -> None:
    """Write ``batch``, as a whole or not at all.  Raises OSError, or DataError if a value is not plain."""
    import pyarrow as pa  # type: ignore[import-untyped]

    try:
        data = msgpack.packb(_plain(batch))
    except DataError:
        raise
    except (OverflowError, RecursionError, ValueError) as error:  # a cycle, half a character
        raise DataError(f"a batch cannot be saved: {error}") from error

    def write(partial: Path) -> None:
        with pa.CompressedOutputStream(str(partial), "zstd") as file:
            file.write(data)

    write_whole(path, write)


def read_batch(path: Path) -> Batch:
    """Read a batch.  Raises DataError."""
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(str(path), "zstd") as file:
            batch = msgpack.unpackb(file.read(), object_hook=_restored, strict_map_key=False)
    except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise DataError(f"{path} is no file of a batch: {error}") from error
    if not isinstance(batch, Batch):
        raise DataError(f"{path} is no file of a batch")
    return batch


def _plain(value: Any) -> Any:
    """Return ``value`` as msgpack has it.  Raises DataError."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        return {_KIND: "integer", "hex": hex(value)}
    if value is None or (isinstance(value, bool | int | float | str | bytes) and type(value).__module__ == "builtins"):
        return value
    if isinstance(value, FinishReason):
        return {_KIND: "finish", "value": value.value}
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        return {_KIND: type(value).__name__} | {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, array | np.ndarray | np.generic):
        return _plain_numbers(value)
    if isinstance(value, tuple):
        return _plain_tuple(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {_KIND: "mapping", "items": [[_plain(key), _plain(each)] for key, each in value.items()]}
    raise _not_plain(value)


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, array):
        return {_KIND: "array", "code": value.typecode, "data": value.tobytes()}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
        return {_KIND: "numpy", "type": value.dtype.str, "shape": value.shape, "data": value.tobytes()}
    if isinstance(value, np.generic) and not isinstance(item := value.item(), np.generic):
        return _plain(item)
    raise _not_plain(value)


def _not_plain(value: Any) -> DataError:
    return DataError(f"a batch with a {type(value).__name__} cannot be saved: {value!r:.100}")


def _plain_tuple(value: tuple[Any, ...]) -> dict[str, Any]:
    if len(value) > 1 and all(type(each) is int for each in value):
        try:
            return {_KIND: "ints", "data": array("q", value).tobytes()}
        except OverflowError:
            pass
    return {_KIND: "tuple", "items": [_plain(each) for each in value]}


def _restored(value: dict[str, Any]) -> Any:
    kind = value.pop(_KIND)
    match kind:
        case "finish":
            return FinishReason(value["value"])
        case "integer":
            return int(value["hex"], 16)
        case "array":
            return array(value["code"], value["data"])
        case "numpy":
            return np.frombuffer(value["data"], value["type"]).reshape(value["shape"])
        case "ints":
            return tuple(array("q", value["data"]))
        case "tuple":
            return tuple(value["items"])
        case "mapping":
            return dict(value["items"])
    return _CLASSES[kind](**value)
