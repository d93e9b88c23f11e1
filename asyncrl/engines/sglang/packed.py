"""A streamed event without its decimal numbers: what the plug-in inside SGLang writes and the client reads.

SGLang writes ``[logprob, token, null]`` for each token, and the token again, and our stamp: 45 bytes, most of them the
17 digits of a float32 that was widened.  Packed they are 11, bit for bit the same, and both processes take a fraction
of the time.  Only requests whose id begins with ``PACKED`` are answered so; everybody else gets what SGLang documents.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import pybase64

from asyncrl.engines.sglang.labels import PACKED, STAMPS
from asyncrl.types import Floats

COLUMNS = "packed"
"""In an event, in the place of ``output_ids``, ``output_token_logprobs`` and the stamps."""
_KEPT = ("id", "finish_reason", "weight_version", "completion_tokens")
"""What the client reads of ``meta_info``, which has fourteen entries and more, the same in each event."""
_INTEGER: Final = "i"
_FLOAT: Final = "f"
"""Typecodes of 4 bytes each, in the byte order of both machines: little-endian wherever CUDA runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """``output_token_logprobs`` of one event, by column."""

    token_ids: Sequence[int]
    logprobs: Floats
    versions: Sequence[tuple[str, int]] | None
    """Runs of equal stamps; None when the server has no plug-in."""


def pack(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What to write for ``event``; None when it must stay as it is.

    Tokens and log-probs are packed only if they belong together.  Raises KeyError, TypeError, ValueError or
    OverflowError for an event that SGLang 0.5.16 would not write.
    """
    meta = event.get("meta_info", {})
    if not str(meta.get("id", "")).startswith(PACKED) or not meta.get("output_token_logprobs"):
        return None
    logprobs, scored, _ = zip(*meta["output_token_logprobs"], strict=True)
    token_ids = event["output_ids"]
    if list(scored) != list(token_ids):
        return None
    columns: dict[str, Any] = {"token_ids": _written(_INTEGER, token_ids), "logprobs": _written(_FLOAT, logprobs)}
    columns["versions"] = runs_of(meta[STAMPS]) if STAMPS in meta else None
    return {
        COLUMNS: columns,  # in front, where ``payload`` looks for it
        "text": event["text"],
        "meta_info": {name: meta[name] for name in _KEPT if name in meta},
    }


def unpack(columns: Mapping[str, Any]) -> Entries:
    """What was packed.  Raises KeyError, TypeError or ValueError for what ``pack`` never writes."""
    return Entries(
        # By way of a list: a tuple made of an array takes half as long again, and so does struct.
        token_ids=tuple(memoryview(_bytes_of(columns["token_ids"])).cast(_INTEGER).tolist()),
        logprobs=array(_FLOAT, _bytes_of(columns["logprobs"])),
        versions=columns["versions"],
    )


def runs_of(stamps: Sequence[str | None]) -> list[tuple[str, int]] | None:
    """Equal neighbours as one, with how many they are; None when a token has no stamp."""
    if stamps and (first := stamps[0]) is not None and first == stamps[-1]:  # versions only grow
        return [(first, len(stamps))]
    runs = [(stamp, len(list(same))) for stamp, same in groupby(stamps) if stamp is not None]
    return runs if sum(length for _, length in runs) == len(stamps) else None


def _written(typecode: str, values: Sequence[Any]) -> str:
    return pybase64.b64encode_as_string(array(typecode, values))


def _bytes_of(text: str) -> bytes:
    return pybase64.b64decode(text, validate=True)
