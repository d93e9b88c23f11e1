"""One event of a streamed answer, from JSON to columns, whether the server packs it or not."""

from array import array
from typing import Any

import orjson

from asyncrl.engines.sglang.labels import STAMPS
from asyncrl.engines.sglang.packed import COLUMNS, Entries, runs_of, unpack

_BEGIN = b'"output_token_logprobs":[['
"""What SGLang writes before the first entry.  Inside a string the quotes would be escaped: it is found nowhere else."""
_PACKED = b'{"%b":' % COLUMNS.encode()
_BRACKETS = b"[]"


def read_event(payload: bytes) -> dict[str, Any]:
    """The event, with its ``output_token_logprobs`` as ``Entries``.

    Raises KeyError, TypeError or ValueError (with orjson.JSONDecodeError) for what no server of ours writes.
    """
    begin = -1 if payload.startswith(_PACKED) else payload.find(_BEGIN)
    return _read_entries(payload, begin + len(_BEGIN)) if begin >= 0 else _read_packed(orjson.loads(payload))


def _read_packed(event: dict[str, Any]) -> dict[str, Any]:
    """A packed event, one without entries, or an error."""
    columns = event.pop(COLUMNS, None)
    if columns is not None:
        entries = event["meta_info"]["output_token_logprobs"] = unpack(columns)
        event["output_ids"] = entries.token_ids
    elif "output_token_logprobs" in event.get("meta_info", {}):  # an empty list
        event["meta_info"]["output_token_logprobs"] = Entries(token_ids=[], logprobs=array("f"), versions=None)
    return event


def _read_entries(payload: bytes, begin: int) -> dict[str, Any]:
    """An event as SGLang writes it.

    Entries ``[logprob, token, null]`` are read as one flat list: a third less time, and nothing for the garbage
    collector to look at.
    """
    end = payload.index(b"]]", begin)
    event: dict[str, Any] = orjson.loads(payload[: begin - 1] + payload[end + 1 :])
    values = orjson.loads(b"[%b]" % payload[begin:end].translate(None, _BRACKETS))
    meta = event["meta_info"]
    stamps = meta.pop(STAMPS, None)
    meta["output_token_logprobs"] = Entries(
        token_ids=values[1::3], logprobs=array("f", values[::3]), versions=None if stamps is None else runs_of(stamps)
    )
    return event
