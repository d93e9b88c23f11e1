"""The messages between a run and its data workers: pickled values, each after its length in 8 bytes."""

import pickle
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from asyncrl.config.areas import DataConfig
from asyncrl.data.making import Broken, Made
from asyncrl.data.raw_rows import PromptFile

LENGTH = struct.Struct("<Q")
STARTED = "started"
"""A worker's answer to its settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The first message to a worker."""

    data: DataConfig
    checkpoint: Path
    files: tuple[PromptFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrompts:
    """A worker's answer: the prompts of a block, each packed, so that the event loop unpacks one at a time."""

    places: array[int]
    """Place of each prompt's row."""
    packed: tuple[bytes, ...]
    too_long: int
    """Rows whose prompt is above the limit."""
    broken: tuple[Broken, ...]
    num_lines: int

    @property
    def num_rows(self) -> int:
        """The number of rows read."""
        return len(self.packed) + self.too_long + len(self.broken)


def pack(made: Made) -> bytes:
    """Pack a prompt into few bytes: token ids as 4-byte integers."""
    tokens = array("i", made.token_ids).tobytes()
    others = (made.label, made.metadata, made.messages, made.template_variables)
    return pickle.dumps((made.place, made.text, tokens, *others), protocol=5)


def unpack(packed: bytes) -> Made:
    """Return the prompt that ``pack`` packed."""
    place, text, tokens, label, metadata, messages, variables = pickle.loads(packed)
    token_ids = array("i")
    token_ids.frombytes(tokens)
    return Made(
        place=place,
        text=text,
        token_ids=tuple(token_ids),
        label=label,
        metadata=metadata,
        messages=messages,
        template_variables=variables,
    )


def framed(value: Any) -> bytes:
    """Return the bytes of a message."""
    payload = pickle.dumps(value, protocol=5)
    return LENGTH.pack(len(payload)) + payload


def read_message(stream: IO[bytes]) -> Any:
    """Read a message.  Raises EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (size,) = LENGTH.unpack(head)
    return pickle.loads(stream.read(size))
