"""Parsing of one event of a streamed answer, packed by the server or not, into columns."""

from array import array
from typing import Any

import orjson

from asyncrl.engines.sglang.labels import ROUTES, STAMPS
from asyncrl.engines.sglang.packed import COLUMNS, Entries, kept_in, routes_in, runs_of, top_in, unpack

_BEGIN = b'"output_token_logprobs":[['
"""The bytes that SGLang writes before the first entry.

They occur nowhere else, because quotes inside a string are escaped.
"""
UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors that reading JSON of another shape raises; orjson.JSONDecodeError is a ValueError."""
_PACKED = b'{"%b":' % COLUMNS.encode()
_BRACKETS = b"[]"


def read_event(payload: bytes) -> dict[str, Any]:
    """Parse an event, with its ``output_token_logprobs`` as ``Entries``.

    Raises one of ``UNREADABLE`` for any other payload.
    """
    begin = -1 if payload.startswith(_PACKED) else payload.find(_BEGIN)
    return _read_entries(payload, begin + len(_BEGIN)) if begin >= 0 else _read_packed(orjson.loads(payload))


def _read_packed(event: dict[str, Any]) -> dict[str, Any]:
    """Convert a packed event, an event without entries, or an error."""
    columns = event.pop(COLUMNS, None)
    if columns is not None:
        entries = event["meta_info"]["output_token_logprobs"] = unpack(columns)
        event["output_ids"] = entries.token_ids
    elif "output_token_logprobs" in event.get("meta_info", {}):  # an empty list
        event["meta_info"]["output_token_logprobs"] = Entries(token_ids=[], logprobs=array("f"), versions=None)
    return event


def _read_entries(payload: bytes, begin: int) -> dict[str, Any]:
    """Parse an event in SGLang's own format.

    Entries ``[logprob, token, null]`` are read as one flat list.  This takes a third less time and leaves no nested
    lists for the garbage collector to traverse.
    """
    end = payload.index(b"]]", begin)
    event: dict[str, Any] = orjson.loads(payload[: begin - 1] + payload[end + 1 :])
    values = orjson.loads(b"[%b]" % payload[begin:end].translate(None, _BRACKETS))
    meta = event["meta_info"]
    stamps = meta.pop(STAMPS, None)
    meta["output_token_logprobs"] = Entries(
        token_ids=values[1::3],
        logprobs=array("f", values[::3]),
        versions=None if stamps is None else runs_of(stamps),
        kept=kept_in(meta, len(values) // 3),
        top=top_in(meta, len(values) // 3),
        routes=routes_in(meta.get(ROUTES)),
    )
    return event
