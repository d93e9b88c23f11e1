"""The packed form of a streamed event: binary columns instead of decimal numbers.

SGLang writes ``[logprob, token, null]`` for each token, then the token again, then our stamp.  Those 45 bytes are
mostly the 17 digits of a float32 that was widened to float64.  Packed they are 11 bytes, bit for bit the same.  Writing
(the plug-in inside SGLang) and reading (the client) take a fraction of the time.

Only requests whose id begins with ``PACKED`` get packed answers; all others get the format that SGLang documents.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Final

import numpy as np
import pybase64

from asyncrl.engines.sglang.labels import PACKED, ROUTES, STAMPS
from asyncrl.token_columns import TokenSets
from asyncrl.types import Floats

COLUMNS = "packed"
"""Key of the columns in an event.  They replace ``output_ids``, ``output_token_logprobs`` and the stamps."""
_KEPT = ("id", "finish_reason", "weight_version", "completion_tokens")
"""Entries of ``meta_info`` that the client reads.

SGLang sends at least fourteen entries, the same in each event.
"""
_INTEGER: Final = "i"
_FLOAT: Final = "f"
"""Typecodes of 4 bytes each, in native byte order.  Both machines are little-endian, as are all that run CUDA."""
MASK, MASK_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
"""SGLang's keys of the ids that were kept for each token, and of the log-probs over them."""

TOP = "output_top_logprobs"
"""SGLang's key of the likeliest ids for each token, as ``[logprob, id, null]``, over the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The ids among which each token of an event was drawn, and the tokens' log-probs over them."""

    sets: TokenSets
    logprobs: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The columns of ``output_token_logprobs`` in one event."""

    token_ids: Sequence[int]
    logprobs: Floats
    versions: Sequence[tuple[str, int]] | None
    """Runs of equal stamps, as (version, number of tokens); None if the server has no plug-in."""
    kept: Kept | None = None
    """None if they were not asked for, or the server has none."""
    top: TokenSets | None = None
    """The likeliest ids, with log-probs over the whole vocabulary; None if they were not asked for."""
    routes: bytes | None = None
    """Experts of the positions that were not sent before; None if the event has none."""


def pack(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the packed form of ``event``, or None if it must be written unchanged.

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
    if (kept := kept_in(meta, len(token_ids))) is not None:
        columns["kept"] = [_written(_INTEGER, kept.sets.counts_T), _written(_INTEGER, kept.sets.ids_I)]
        columns["kept_logprobs"] = _written(_FLOAT, kept.logprobs)
    if (top := top_in(meta, len(token_ids))) is not None:
        columns["top"] = [_written(_INTEGER, each) for each in (top.counts_T, top.ids_I)]
        columns["top_logprobs"] = _written(_FLOAT, top.logprobs_I)
    if meta.get(ROUTES) is not None:
        columns["routes"] = meta[ROUTES]  # in base64 already
    return {
        COLUMNS: columns,  # first: ``client/payload`` recognizes a packed event by its first key
        "text": event["text"],
        "meta_info": {name: meta[name] for name in _KEPT if name in meta},
    }


def unpack(columns: Mapping[str, Any]) -> Entries:
    """Decode the columns of an event.  Raises KeyError, TypeError or ValueError for what ``pack`` never writes."""
    return Entries(
        # Via a list: building the tuple from an array takes 1.5 times as long, and so does struct.
        token_ids=tuple(memoryview(_bytes_of(columns["token_ids"])).cast(_INTEGER).tolist()),
        logprobs=array(_FLOAT, _bytes_of(columns["logprobs"])),
        versions=columns["versions"],
        kept=_unpacked_kept(columns) if "kept" in columns else None,
        top=_unpacked_top(columns) if "top" in columns else None,
        routes=routes_in(columns.get("routes")),
    )


def routes_in(texts: str | Sequence[str] | None) -> bytes | None:
    """Return the bytes of routes, which come in one text or several.  Raises ValueError for other text."""
    if texts is None:
        return None
    return b"".join(map(_bytes_of, (texts,) if isinstance(texts, str) else texts))


def kept_in(meta: Mapping[str, Any], num_tokens: int) -> Kept | None:
    """Return the kept sets of SGLang's ``meta_info``; None unless each of the tokens has one."""
    masks, logprobs = meta.get(MASK), meta.get(MASK_LOGPROBS)
    if not masks or not logprobs or not len(masks) == len(logprobs) == num_tokens:
        return None
    if None in masks or None in logprobs:
        return None
    sets = TokenSets(
        counts_T=np.fromiter(map(len, masks), np.int32, len(masks)),
        ids_I=np.fromiter(chain.from_iterable(masks), np.int32),
    )
    return Kept(sets=sets, logprobs=array(_FLOAT, logprobs))


def top_in(meta: Mapping[str, Any], num_tokens: int) -> TokenSets | None:
    """Return the likeliest ids of SGLang's ``meta_info``, with log-probs; None unless each of the tokens has some."""
    rows = meta.get(TOP)
    if not rows or len(rows) != num_tokens or not all(rows):
        return None
    logprobs, ids, _ = zip(*chain.from_iterable(rows), strict=True)
    return TokenSets(
        counts_T=np.fromiter(map(len, rows), np.int32, len(rows)),
        ids_I=np.array(ids, np.int32),
        logprobs_I=np.array(logprobs, np.float32),
    )


def _unpacked_top(columns: Mapping[str, Any]) -> TokenSets:
    counts, ids = (np.frombuffer(_bytes_of(each), np.int32) for each in columns["top"])
    return TokenSets(
        counts_T=counts, ids_I=ids, logprobs_I=np.frombuffer(_bytes_of(columns["top_logprobs"]), np.float32)
    )


def _unpacked_kept(columns: Mapping[str, Any]) -> Kept:
    counts, ids = (np.frombuffer(_bytes_of(each), np.int32) for each in columns["kept"])
    logprobs = array(_FLOAT, _bytes_of(columns["kept_logprobs"]))
    return Kept(sets=TokenSets(counts_T=counts, ids_I=ids), logprobs=logprobs)


def runs_of(stamps: Sequence[str | None]) -> list[tuple[str, int]] | None:
    """Run-length encode ``stamps`` as (stamp, count); None if a token has no stamp."""
    if stamps and (first := stamps[0]) is not None and first == stamps[-1]:  # versions never decrease
        return [(first, len(stamps))]
    runs = [(stamp, len(list(same))) for stamp, same in groupby(stamps) if stamp is not None]
    return runs if sum(length for _, length in runs) == len(stamps) else None


def _written(typecode: str, values: Sequence[Any] | np.ndarray[Any, Any] | None) -> str:
    return pybase64.b64encode_as_string(values if isinstance(values, np.ndarray) else array(typecode, values or ()))


def _bytes_of(text: str) -> bytes:
    return pybase64.b64decode(text, validate=True)
