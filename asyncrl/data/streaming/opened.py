"""The start of a stream: its head is read and checked before anything else starts."""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from asyncrl.config.areas import DataConfig
from asyncrl.data.files import open_files
from asyncrl.data.making import Broken, Made, PromptMaker
from asyncrl.data.prompts import MESSAGES_NOTE
from asyncrl.data.raw_rows import PromptFile
from asyncrl.data.streaming.order import StreamOrder
from asyncrl.data.streaming.stream import PromptStream
from asyncrl.data.streaming.table import BlockTable
from asyncrl.data.streaming.wire import WorkerSettings
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import DataError

logger = logging.getLogger(__name__)

HEAD_ROWS = 100
"""Rows that are read at the start.  If all of them are broken, a setting is wrong rather than a row."""
_END_BYTES = 65_536
"""Bytes at each end of a file that count in the fingerprint."""


def open_stream(data: DataConfig, tokenizer: TextTokenizer, checkpoint: Path) -> PromptStream:
    """Open a stream of the files in ``data`` for workers that load the tokenizer of ``checkpoint``.

    Reads the first rows of the first file, both ends of every file, and the footers and a few rows of Parquet files; a
    slice of JSONL is searched for its ends.  Raises DataError.
    """
    files, maker = open_files(data.prompt_data, data), PromptMaker(data, tokenizer)
    try:
        head = _checked_head(files, maker, data)
        digest = _fingerprint(files, data, head)
    except OSError as error:
        raise DataError(f"prompt-data: {error}") from error
    if any(made.messages is not None for made in head):
        logger.info(MESSAGES_NOTE, data.input_key)
    table = BlockTable(files)
    logger.info("streaming %s: %d blocks, %d workers", _names(files), len(table), data.num_workers)
    return PromptStream(
        settings=WorkerSettings(data=data, checkpoint=checkpoint, files=files),
        table=table,
        order=StreamOrder(len(table), data.rollout_seed if data.rollout_shuffle else None),
        maker=maker,
        fingerprint=digest,
    )


def _checked_head(files: Sequence[PromptFile], maker: PromptMaker, data: DataConfig) -> list[Made]:
    """Return the prompts among the first rows.  Raises DataError if there is no row, or no row is whole."""
    file = files[0]
    rows = list(itertools.islice(file.rows(), HEAD_ROWS))
    if not rows:
        raise DataError(f"{file.path}: the file has no rows")
    found = list(maker.made(rows))
    broken = [made for made in found if isinstance(made, Broken)]
    if len(broken) == len(found):
        first = broken[0]
        which = "row is" if len(found) == 1 else f"{len(found)} rows are all"
        raise DataError(f"{file.where(first.place, first.line)}: {first.fault} (the first {which} broken)")
    return [made for made in found if isinstance(made, Made)]


def _fingerprint(files: Sequence[PromptFile], data: DataConfig, head: Sequence[Made]) -> str:
    """Return a digest of both ends and the size of every file, the settings, and the tokens of the head.

    A file may move.  A change in the middle of a file that keeps its size is not noticed.
    """
    digest = hashlib.blake2b(digest_size=16)
    seed = data.rollout_seed if data.rollout_shuffle else None
    settings = (data.input_key, data.label_key, data.metadata_key, data.tool_key, data.apply_chat_template)
    digest.update(repr((settings, data.apply_chat_template_kwargs, data.rollout_max_prompt_len, seed)).encode())
    for file in files:
        with file.path.open("rb") as handle:
            digest.update(repr((file.first, file.stop, file.extent)).encode() + _ends(handle))
    for made in head:
        digest.update(repr(made.token_ids).encode())
    return digest.hexdigest()


def _ends(handle: IO[bytes]) -> bytes:
    """Return the first and the last bytes of a file, and its size."""
    head = handle.read(_END_BYTES)
    size = handle.seek(0, 2)
    handle.seek(max(0, size - _END_BYTES))
    return head + handle.read(_END_BYTES) + str(size).encode()


def _names(files: Sequence[PromptFile]) -> str:
    return ", ".join(str(file.path) for file in files)
