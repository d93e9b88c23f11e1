"""The files of prompts: their formats and slices."""

from collections.abc import Iterable
from pathlib import Path

from asyncrl.config.areas import DataConfig
from asyncrl.config.areas.data import sliced
from asyncrl.data.jsonl import open_jsonl
from asyncrl.data.raw_rows import PromptFile
from asyncrl.errors import DataError


def open_files(paths: Iterable[Path], data: DataConfig) -> tuple[PromptFile, ...]:
    """Open every file of ``paths``, each with an optional slice.  Raises DataError, also for a file without rows."""
    return tuple(_opened(path, data) for path in paths)


def _opened(path: Path, data: DataConfig) -> PromptFile:
    name, wanted = sliced(path)
    try:
        if not name.is_dir() and not name.is_file() and name.exists():
            raise DataError(f"{name}: not a regular file")
        file = _file(name, wanted, data)
    except FileNotFoundError:
        raise DataError(f"{name}: no such file") from None
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}") from error
    if file.num_blocks == 0:
        raise DataError(f"{path}: the {'file' if path == name else 'slice'} has no rows")
    return file


def _file(name: Path, wanted: slice, data: DataConfig) -> PromptFile:
    if name.suffix != ".parquet" or name.is_dir():
        return open_jsonl(name, wanted)
    from asyncrl.data.parquet import open_parquet  # takes 0.2 s and 60 MB, which JSONL does not need

    return open_parquet(name, wanted, data)
